"""The janitor: takes back what the dead held, rings for what waits, closes what may not run, ends jobs.

Every worker carries one, and `nightmill janitor` is one; of all of them one works at a time. What each does is safe to
do twice, so losing that lock costs effort and nothing else.
"""

import logging
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from nightmill.broker import Broker
from nightmill.closing import close_shard, end_job, side_by_side
from nightmill.config import Settings
from nightmill.errors import BrokerError, NightmillError, PartLostError, StoreError
from nightmill.output.closer import GIVE_UP_AFTER, PartCloser, finalize
from nightmill.relay import relay
from nightmill.states import ShardState
from nightmill.store import Store
from nightmill.worker_lock import new_worker_id, sweep_dead

log = logging.getLogger(__name__)

EVERY_S = 2.0  # between sweeps
MAX_CLOSINGS = 100  # shards in one sweep: the next tasks of a sweep wait for them
MAX_ENDINGS = 20  # jobs in one sweep
RING_EVERY_S = 10.0  # between looks for shards whose ring was lost
LOST_AFTER = 8  # failed tries to end a job whose part is gone, 14 minutes: then it ends as failed
_PAUSE_S, _MAX_PAUSE_S = 4.0, 300.0  # after a job's closing has failed: doubling


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Leases taken back."""

    num_dead: int  # of workers on this machine that have ended
    num_expired: int


@dataclass(slots=True, kw_only=True)
class JanitorReport:
    """What one sweep did."""

    granted: bool = False  # we were the one janitor; else only the dead of this machine and the outbox were seen to
    num_dead: int = 0  # leases taken back from workers on this machine that have ended
    num_expired: int = 0  # leases taken back because their time had run out
    num_stale: int = 0  # shards to be rung for once more
    num_rings: int = 0  # that left the outbox
    num_closed: int = 0  # shards
    ended: list[str] = field(default_factory=list)  # jobs
    troubles: list[str] = field(default_factory=list)  # what failed, and will be tried again

    @property
    def did_something(self) -> bool:
        """Whether there is anything to tell."""
        numbers = (self.num_dead, self.num_expired, self.num_stale, self.num_rings, self.num_closed)
        return any(numbers) or bool(self.ended or self.troubles)

    @property
    def is_only_trouble(self) -> bool:
        """Whether nothing was done but what failed: that is in the log already."""
        return bool(self.troubles) and not replace(self, troubles=[]).did_something

    def line(self) -> str:
        """In words."""
        counts = {
            "leases of the dead": self.num_dead,
            "expired leases": self.num_expired,
            "rings sent": self.num_rings,
            "rings repeated": self.num_stale,
            "shards closed": self.num_closed,
            "failed": len(self.troubles),
        }
        told = [f"{name}: {count}" for name, count in counts.items() if count]
        return ", ".join([*told, *(f"ended {job_id}" for job_id in self.ended)]) or "nothing to do"


def sweep(store: Store, workers_dir: Path) -> Sweep:
    """Take back the leases of dead workers at once, and of silent ones when their time has run out."""
    return Sweep(num_dead=_bury(store, workers_dir), num_expired=store.expire_leases())


def _bury(store: Store, workers_dir: Path) -> int:
    num_dead = 0

    def bury(worker_ids: Sequence[str]) -> None:
        nonlocal num_dead
        num_dead = store.release_dead(worker_ids)

    sweep_dead(workers_dir, bury)
    return num_dead


class Janitor:
    """Call `sweep` every few seconds, or `run`. One thread at a time.

    Args:
        store: Of this process.
        settings: For the workers of this machine, and how soon an unheard ring is repeated.
        broker: None: nobody is rung.
        worker_id: Holds the leases of shards that are being closed; None: an own one.
    """

    def __init__(
        self, store: Store, settings: Settings, broker: Broker | None = None, *, worker_id: str | None = None
    ) -> None:
        self._store = store
        self._settings = settings
        self._broker = broker
        self._worker_id = worker_id or new_worker_id()
        self._look_for_stale_at = 0.0
        self._pauses: dict[str, _Pause] = {}
        self._known: frozenset[str] = frozenset()  # troubles of the last sweep: an outage is told once, not every 2 s

    def sweep(self) -> JanitorReport:
        """One round. A job that cannot be closed, or a broker that is down, is told in the report and tried again.

        Raises:
            StoreError: the store cannot be reached.
        """
        report = JanitorReport()
        report.num_dead = _bury(self._store, self._settings.workers_dir)
        with self._store.janitor_lock() as granted:
            report.granted = granted
            if granted:
                while expired := self._store.expire_leases():
                    report.num_expired += expired
                self._ring_stale(report)
            self._relay(report)  # those of others, too, while the one janitor is busy with closing
            if granted:
                self._close(report)
                self._end(report)
        self._known = frozenset(report.troubles)
        return report

    def run(self, stop: threading.Event) -> None:
        """Sweep until `stop` is set; a store that is away is waited for."""
        while not stop.is_set():
            try:
                report = self.sweep()
                if report.did_something and not report.is_only_trouble:
                    log.info("%s", report.line())
            except StoreError as error:
                log.error("the sweep was broken off: %s", error)
            stop.wait(EVERY_S * random.uniform(0.7, 1.3))

    def _ring_stale(self, report: JanitorReport) -> None:
        if self._broker is None or time.monotonic() < self._look_for_stale_at:
            return
        after_s = self._settings.ring_after_s
        self._look_for_stale_at = time.monotonic() + min(RING_EVERY_S, after_s)
        with self._told(report, "the queues", BrokerError):
            report.num_stale = self._store.ring_stale(self._broker.queue_depths(), after_s=after_s)

    def _relay(self, report: JanitorReport) -> None:
        if self._broker is not None:
            with self._told(report, "the outbox", BrokerError):
                report.num_rings = relay(self._store, self._broker)

    def _close(self, report: JanitorReport) -> None:
        closer = PartCloser(self._store)
        troubles: dict[str, Exception] = {}
        due = self._due()

        def close(shard: tuple[str, int, ShardState]) -> bool:
            job_id, shard_id, reason = shard
            if job_id in troubles:
                return False  # one is enough: it will be tried again
            try:
                gives_up = self._has_failed(job_id, GIVE_UP_AFTER)
                write = partial(closer.close, gives_up=gives_up)
                return close_shard(self._store, self._worker_id, write, shard_id, reason)
            except StoreError:
                raise
            except Exception as error:  # noqa: BLE001 - one job's trouble is not the next one's
                troubles.setdefault(job_id, error)
                return False

        report.num_closed += sum(side_by_side(close, due))
        for job_id in dict.fromkeys(job_id for job_id, _, _ in due):
            self._judge(job_id, "closing", troubles.get(job_id), report)

    def _due(self) -> list[tuple[str, int, ShardState]]:
        """Shards to close now: job, shard, reason."""
        due: list[tuple[str, int, ShardState]] = []
        for job_id in self._store.jobs_to_close():
            left = MAX_CLOSINGS - len(due)
            if left <= 0:
                break
            if not self._is_paused(job_id):
                due += [(job_id, *shard) for shard in self._store.due_for_closing(left, job_id)]
        return due

    def _end(self, report: JanitorReport) -> None:
        found = self._store.finalizable_jobs(MAX_ENDINGS + len(self._pauses))
        job_ids = [job_id for job_id in found if not self._is_paused(job_id)]
        for job_id, ended in zip(job_ids, side_by_side(self._end_job, job_ids), strict=True):
            self._judge(job_id, "ending", ended if isinstance(ended, Exception) else None, report)
            if ended is True:
                report.ended.append(job_id)

    def _end_job(self, job_id: str) -> bool | Exception:
        try:
            return end_job(self._store, job_id, partial(finalize, self._store))
        except StoreError:
            raise
        except PartLostError as error:
            if not self._has_failed(job_id, LOST_AFTER):
                return error
            # Whoever waits for the job must hear of it: it would not end before somebody puts the part back.
            self._store.abandon_job(job_id, error.code, error.message)
            return True
        except Exception as error:  # noqa: BLE001 - as above
            return error

    def _has_failed(self, job_id: str, times: int) -> bool:
        pause = self._pauses.get(job_id)
        return pause is not None and pause.count >= times

    def _is_paused(self, job_id: str) -> bool:
        pause = self._pauses.get(job_id)
        return pause is not None and time.monotonic() < pause.until

    def _judge(self, job_id: str, what: str, trouble: Exception | None, report: JanitorReport) -> None:
        """One job's trouble (its folder is gone, its bucket refuses) is tried again later, and the others go on."""
        if trouble is None:
            self._pauses.pop(job_id, None)
            return
        self._pauses[job_id] = _Pause.after(self._pauses.get(job_id))
        with self._told(report, f"{what} {job_id}", Exception):
            raise trouble

    @contextmanager
    def _told(self, report: JanitorReport, what: str, expected: type[Exception]) -> Iterator[None]:
        """What fails here is tried again in a later sweep; a store that is away ends this one."""
        try:
            yield
        except StoreError:
            raise
        except expected as error:
            is_ours = isinstance(error, NightmillError)
            trouble = f"{what}: {error.message if isinstance(error, NightmillError) else repr(error)}"
            report.troubles.append(trouble)
            level = logging.DEBUG if trouble in self._known else logging.ERROR
            log.log(level, "%s: %s", what, error, exc_info=None if is_ours else error)


@dataclass(frozen=True, slots=True)
class _Pause:
    length_s: float
    until: float
    count: int  # failures in a row

    @classmethod
    def after(cls, last: "_Pause | None") -> "_Pause":
        length_s = _PAUSE_S if last is None else min(2 * last.length_s, _MAX_PAUSE_S)
        return cls(length_s, time.monotonic() + length_s, 1 if last is None else last.count + 1)
