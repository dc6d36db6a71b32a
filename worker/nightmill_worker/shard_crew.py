"""The shards of one job that this process works on at once, each on its own thread, all feeding one engine."""

import threading
from collections import Counter

from nightmill.errors import FencedError
from nightmill.failpoint import failpoint
from nightmill_worker.drain import Drain
from nightmill_worker.heartbeat import Heartbeat
from nightmill_worker.shard import JobContext, ShardRun
from nightmill_worker.supervisor import EngineSupervisor

MAX_SHARDS = 32  # at once. Two or three are usual: the next is taken when all others have been read to their end


class ShardCrew:
    """Takes shards while the engine has room for more. Used by the main thread; the shards are the other ones."""

    def __init__(
        self, context: JobContext, supervisor: EngineSupervisor, heartbeat: Heartbeat, drain: Drain, worker_id: str
    ) -> None:
        self._context = context
        self._supervisor = supervisor
        self._heartbeat = heartbeat
        self._drain = drain
        self._worker_id = worker_id
        self._active: dict[threading.Thread, ShardRun] = {}
        self._failure: BaseException | None = None
        self._stopping = False
        self._somebody_ended = threading.Event()
        self._ended: Counter[str] = Counter()

    @property
    def counts(self) -> Counter[str]:
        """Rows of all shards so far: `completed` and `failed` (of earlier attempts too), `resumed`, `recomputed`."""
        total = self._ended.copy()
        for run in self._active.values():
            total.update(_counts(run))
        return total

    def take_turn(self) -> bool:
        """Gather shards that ended, take another if there is room; False when none is at work and none to be had.

        Raises:
            NightmillError: A shard failed. The others have stopped and given their leases back.
        """
        self._gather()
        if self._failure is not None:
            self.stop()
            raise self._failure
        while self._has_room() and self._take():
            pass
        return bool(self._active)

    def wait(self, timeout_s: float) -> None:
        """Until a shard ends, or for so long."""
        self._somebody_ended.wait(timeout_s)
        self._somebody_ended.clear()

    def stop(self) -> None:
        """Stop every shard; what is finished is durable when this returns."""
        self._stopping = True
        for run in self._active.values():
            run.stop_job()
        for thread in self._active:
            thread.join()
        self._gather()

    def _has_room(self) -> bool:
        if self._stopping or self._drain.requested or len(self._active) >= MAX_SHARDS:
            return False
        return self._supervisor.has_room and not any(run.is_reading for run in self._active.values())

    def _take(self) -> bool:
        store = self._context.store
        for shard_id in store.available_shards(1, self._context.job.job_id):
            lease = store.claim(shard_id, self._worker_id)
            if lease is None:
                return True  # somebody was faster: look again
            failpoint("after_claim")
            run = ShardRun(lease, self._context, self._supervisor, self._drain)
            thread = threading.Thread(target=self._work, args=(run,), name=f"shard-{lease.range.index}", daemon=True)
            self._active[thread] = run
            self._heartbeat.hold(run)
            thread.start()
            return True
        return False

    def _work(self, run: ShardRun) -> None:
        try:
            run.run()
        except FencedError:
            pass  # another attempt has it, and its word counts
        except BaseException as failure:  # noqa: BLE001 - raised again by take_turn, on the main thread
            self._failure = self._failure or failure
        finally:
            run.is_reading = False
            self._heartbeat.drop(run)
            self._somebody_ended.set()

    def _gather(self) -> None:
        for thread in [thread for thread in self._active if not thread.is_alive()]:
            self._ended.update(_counts(self._active.pop(thread)))


def _counts(run: ShardRun) -> Counter[str]:
    return Counter(
        completed=run.progress.rows_completed,
        failed=run.progress.rows_failed,
        resumed=run.rows_resumed,
        recomputed=run.rows_recomputed,
    )
