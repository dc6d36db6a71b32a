"""From what a person says to a job: its id, its output location, or nothing for the last one."""

from nightmill.errors import NotFoundError
from nightmill.records import JobInfo
from nightmill.storage import absolute
from nightmill.store import Store

_WHERE = "`nightmill list` shows the jobs of this store; NIGHTMILL_HOME or DATABASE_URL choose another store."


def find_job(store: Store, reference: str | None) -> JobInfo:
    """The job with this id or this output location; without a reference the last one submitted.

    Raises:
        NotFoundError: There is none.
    """
    if reference is None:
        last = store.jobs(limit=1)
        if not last:
            raise NotFoundError("there are no jobs in this store yet", hint=_WHERE)
        return last[0]
    if not reference or reference != reference.encode(errors="replace").decode():
        raise NotFoundError(f"no job has the id or the output {reference!r}", hint=_WHERE)
    if "/" not in reference and "\\" not in reference:
        try:
            return store.job(reference)
        except NotFoundError:
            pass  # a folder name, perhaps
    job = store.job_for_output(absolute(reference))
    if job is None:
        raise NotFoundError(f"no job has the id or the output {reference!r}", hint=_WHERE)
    return job
