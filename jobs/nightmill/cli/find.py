"""What the commands that look at a job have in common: the store, and the argument that names the job."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from nightmill.config import Settings
from nightmill.lookup import find_job
from nightmill.store import Store

__all__ = ["find_job", "job_argument", "open_store"]


@contextmanager
def open_store() -> Iterator[Store]:
    """The store of this environment, brought up to date."""
    store = Store(Settings.from_env().database_url)
    try:
        store.migrate()
        yield store
    finally:
        store.close()


def job_argument(command: Callable[..., Any]) -> Callable[..., Any]:
    """`[JOB]`: a job id or an output location; the last job without it."""
    return click.argument("job", required=False, metavar="[JOB|OUTPUT]")(command)
