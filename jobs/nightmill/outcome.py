"""How a job ended, as the exit code that schedulers act on."""

from nightmill.errors import ErrorBudgetExceededError, ExitCode
from nightmill.records import JobInfo
from nightmill.states import TERMINAL_JOB, JobStatus


def exit_code(job: JobInfo) -> int:
    """0 done, 1 failed, 5 every row failed or more than --max-failed-rows, 6 cancelled or expired. Of an ended job."""
    if job.status not in TERMINAL_JOB:
        raise ValueError(f"job {job.job_id} is {job.status} and has not ended")
    limit = job.options.max_failed_rows
    match job.status:
        case JobStatus.CANCELLED | JobStatus.EXPIRED:
            return ExitCode.CANCELLED
        case JobStatus.COMPLETED if job.rows.completed and (limit is None or job.rows.failed <= limit):
            return ExitCode.DONE
        case JobStatus.COMPLETED:
            return ExitCode.ROWS_FAILED
        case _ if job.error_code == ErrorBudgetExceededError.code:
            return ExitCode.ROWS_FAILED
        case _:
            return ExitCode.FAILED
