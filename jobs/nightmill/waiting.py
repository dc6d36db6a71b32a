"""Waiting for a job: looks at the store until it has ended, also over a restart of the database."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nightmill.durations import clock
from nightmill.errors import StoreError, WaitTimedOutError
from nightmill.records import JobInfo
from nightmill.states import TERMINAL_JOB
from nightmill.store import Store

FIRST_LOOK_S = 0.1
LOOK_S = 1.0
MIN_SLEEP_S = 1e-3
PATIENCE_S = 900.0
"""A database that was there and does not answer for this long is taken for gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One look at a job."""

    at: float  # monotonic clock, s
    job: JobInfo | None = None  # None: the store did not answer
    trouble: str | None = None  # why


def looks(
    store: Store,
    job_id: str,
    *,
    timeout_s: float | None = None,
    look_s: float = LOOK_S,
    sleep: Callable[[float], None] = time.sleep,
    monotonic: Callable[[], float] = time.monotonic,
) -> Iterator[Look]:
    """Look at a job again and again; the last look is at a job that has ended.

    A store that does not answer makes a look with `trouble`, once it has answered before.

    Args:
        store: Where the job is.
        job_id: Of the job.
        timeout_s: None: as long as it takes.
        look_s: Between looks; the first ones come sooner.
        sleep: For tests.
        monotonic: For tests.

    Raises:
        NotFoundError: there is no such job.
        StoreError: the store did not answer from the start, or not for PATIENCE_S.
        WaitTimedOutError: the job has not ended in time; it goes on.
    """
    began = answered = monotonic()
    pause = min(FIRST_LOOK_S, look_s)
    job: JobInfo | None = None
    while True:
        try:
            job = store.job(job_id)
        except StoreError as error:
            if job is None or monotonic() - answered > PATIENCE_S:
                raise
            yield Look(at=monotonic(), trouble=error.message)
        else:
            answered = monotonic()
            yield Look(at=answered, job=job)
            if job.status in TERMINAL_JOB:
                return
        left = None if timeout_s is None else timeout_s - (monotonic() - began)
        if left is not None and left < MIN_SLEEP_S:
            assert timeout_s is not None
            raise WaitTimedOutError(
                f"job {job_id} is {job.status} after {clock(timeout_s)} of waiting; it goes on",
                hint=f"nightmill wait {job_id} waits again; nightmill cancel {job_id} stops it",
            )
        sleep(pause if left is None else min(pause, left))
        pause = min(look_s, pause * 1.5)


def wait_for_end(store: Store, job_id: str, *, timeout_s: float | None = None, look_s: float = LOOK_S) -> JobInfo:
    """Wait until a job has ended; raises what `looks` raises."""
    last = None
    for look in looks(store, job_id, timeout_s=timeout_s, look_s=look_s):
        last = look.job
    assert last is not None
    return last
