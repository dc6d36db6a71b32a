"""How a job ended, as an exit code and in words."""

from nightmill.cli.show import show_note
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


def tell_outcome(job: JobInfo) -> int:
    """The exit code; when it is not 0, also what happened and what to do, on stderr."""
    code = exit_code(job)
    if code == ExitCode.CANCELLED:
        show_note(f"job {job.job_id} is {job.status.value}: what was finished is in {job.spec.output}")
    elif job.status is JobStatus.FAILED:
        show_note(f"job {job.job_id} failed ({job.error_code}): {job.error_message}")
        show_note(f"  What was finished is in {job.spec.output}; give another output to try again.")
    elif code == ExitCode.ROWS_FAILED:
        what = "every row" if not job.rows.completed else f"{job.rows.failed:,} of {job.rows.total:,} rows"
        show_note(f"{what} failed: `nightmill errors {job.job_id}` shows why")
    return code
