"""Stay with a job until it ends: behind `watch`, `wait` and every `--wait`."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from nightmill.cli.show import show_note
from nightmill.cli.watch_view import WatchView
from nightmill.config import Settings
from nightmill.errors import ExitCode
from nightmill.progress import ProgressMeter
from nightmill.records import JobInfo
from nightmill.store import Store
from nightmill.waiting import looks


def follow(store: Store, job_id: str, view: WatchView, *, timeout_s: float | None = None) -> JobInfo:
    """Show a job until it has ended; returns how. A signal ends the waiting, never the job.

    Raises:
        WaitTimedOutError: it has not ended in time.
        StoreError: the store is gone for good.
    """
    meter = ProgressMeter()
    job: JobInfo | None = None
    with terminable(), view:
        for look in looks(store, job_id, timeout_s=timeout_s):
            if look.job is None:
                view.trouble(look.trouble or "no reason given")
                continue
            job = look.job
            view.show(meter.look(job, look.at))
    assert job is not None
    return job


def warn_if_nobody_runs(store: Store, job: JobInfo) -> None:
    """Of a job in a file on this machine: without a process that holds it, waiting would be for ever."""
    if Settings.from_env().is_embedded and job.started_at is not None and not store.has_live_leases(job.job_id):
        show_note(f"no process works on job {job.job_id} now: start `nightmill worker`, or its `nightmill run` again")


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM ends the command with 143: as the first process of a container it would be ignored otherwise."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> NoReturn:
        raise SystemExit(ExitCode.TERMINATED)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
