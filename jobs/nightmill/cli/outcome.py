"""How a job ended, in words."""

from nightmill.cli.show import show_note
from nightmill.errors import ExitCode
from nightmill.outcome import exit_code
from nightmill.records import JobInfo
from nightmill.states import JobStatus


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
