"""The shards that this process works on at once, of any job, each on its own thread, all feeding one engine."""

import logging
import statistics
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from nightmill.errors import FencedError
from nightmill.logs import shard_context
from nightmill.records import ShardLease
from nightmill_worker.drain import Drain
from nightmill_worker.heartbeat import Heartbeat
from nightmill_worker.shard import JobContext, ShardEnd, ShardRun
from nightmill_worker.solitude import Solitude
from nightmill_worker.supervisor import EngineSupervisor

log = logging.getLogger(__name__)

MAX_SHARDS = 32  # at once: each costs a thread, and the memory of the part that it writes in the end
STARTS = 16  # of shards: how long they took is remembered


@dataclass(frozen=True, slots=True)
class EndedShard:
    """How one attempt ended: `failure` is None unless it raised."""

    run: ShardRun
    end: ShardEnd | None
    failure: BaseException | None


class ShardCrew:
    """Runs leases. `start`, `gather` and `stop` may be called from several threads; the shards are other ones."""

    def __init__(self, supervisor: EngineSupervisor, heartbeat: Heartbeat, drain: Drain) -> None:
        self._supervisor = supervisor
        self._heartbeat = heartbeat
        self._drain = drain
        self.solitude = Solitude()
        self._lock = threading.Lock()
        self._active: dict[threading.Thread, ShardRun] = {}
        self._ended: list[EndedShard] = []
        self._somebody_ended = threading.Event()
        self._past: Counter[str] = Counter()
        self._starts_s: deque[float] = deque(maxlen=STARTS)

    def start(self, lease: ShardLease, context: JobContext, on_end: Callable[[], None] | None = None) -> ShardRun:
        """Begin an attempt.

        Args:
            lease: Just taken.
            context: Of its job.
            on_end: Called once, on the shard's thread, when it has ended in whatever way.
        """
        run = ShardRun(lease, context, self._supervisor, self._drain, self.solitude, self.wake)
        name = f"shard-{lease.job_id}-{lease.range.index}"
        thread = threading.Thread(target=self._work, args=(run, on_end), name=name, daemon=True)
        with self._lock:
            self._active[thread] = run
        self._heartbeat.hold(run)
        thread.start()
        return run

    @property
    def active(self) -> list[ShardRun]:
        """Attempts at work."""
        with self._lock:
            return list(self._active.values())

    @property
    def counts(self) -> Counter[str]:
        """Rows of all shards so far: `completed` and `failed` (of earlier attempts too), `resumed`, `recomputed`."""
        with self._lock:
            total = self._past.copy()
            for run in self._active.values():
                total.update(_counts(run))
        return total

    @property
    def rows_ahead(self) -> int:
        """Rows of the active shards that have no answer yet, offered or not."""
        return sum(
            run.lease.range.num_rows - run.progress.rows_completed - run.progress.rows_failed for run in self.active
        )

    @property
    def rows_run(self) -> int:
        """Rows that have got their answer here."""
        counts = self.counts
        return counts["completed"] + counts["failed"] - counts["resumed"]

    @property
    def start_s(self) -> float:
        """From the begin of an attempt to its first row for the engine, of the last ones; 0: not known yet."""
        with self._lock:
            return statistics.median(self._starts_s) if self._starts_s else 0.0

    def gather(self) -> list[EndedShard]:
        """Attempts that have ended since the last call."""
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def wait(self, timeout_s: float) -> None:
        """Until a shard has been read, or ends, or for so long."""
        self._somebody_ended.wait(timeout_s)
        self._somebody_ended.clear()

    def wake(self) -> None:
        """End a `wait` now."""
        self._somebody_ended.set()

    def stop(self) -> None:
        """Stop every shard; what is finished is durable when this returns."""
        with self._lock:
            active = dict(self._active)
        for run in active.values():
            run.stop_job()
        for thread in active:
            thread.join()

    def _work(self, run: ShardRun, on_end: Callable[[], None] | None) -> None:
        end: ShardEnd | None = None
        failure: BaseException | None = None
        with shard_context(run.lease):
            try:
                end = run.run()
                log.info("%s after %d rows", end.value, run.progress.rows_completed + run.progress.rows_failed)
            except FencedError as fenced:
                end = ShardEnd.LOST  # another attempt has it, and its word counts
                log.warning("%s", fenced)
            except BaseException as error:  # noqa: BLE001 - whoever gathers decides what it means
                failure = error
        self._heartbeat.drop(run)
        with self._lock:
            self._past.update(_counts(run))
            if run.start_s is not None:
                self._starts_s.append(run.start_s)
            del self._active[threading.current_thread()]
            self._ended.append(EndedShard(run, end, failure))
        if on_end is not None:
            on_end()
        self._somebody_ended.set()


def _counts(run: ShardRun) -> Counter[str]:
    return Counter(
        completed=run.progress.rows_completed,
        failed=run.progress.rows_failed,
        resumed=run.rows_resumed,
        recomputed=run.rows_recomputed,
    )
