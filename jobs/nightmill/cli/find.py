"""From what a person types to a job: its id, its output location, or nothing for the last one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from nightmill.config import Settings
from nightmill.errors import NotFoundError
from nightmill.records import JobInfo
from nightmill.storage import absolute
from nightmill.store import Store


@contextmanager
def open_store() -> Iterator[Store]:
    """The store of this environment, brought up to date."""
    store = Store(Settings.from_env().database_url)
    try:
        store.migrate()
        yield store
    finally:
        store.close()


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


_WHERE = "`nightmill list` shows the jobs of this store; NIGHTMILL_HOME or DATABASE_URL choose another store."


def job_argument(command: Callable[..., Any]) -> Callable[..., Any]:
    """`[JOB]`: a job id or an output location; the last job without it."""
    return click.argument("job", required=False, metavar="[JOB|OUTPUT]")(command)
