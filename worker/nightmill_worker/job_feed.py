"""Which shard a run of one job takes next: the first that is available, whenever all others have been read."""

import time

from nightmill.failpoint import failpoint
from nightmill.records import JobInfo
from nightmill_worker.drain import Drain
from nightmill_worker.shard import JobContext
from nightmill_worker.shard_crew import MAX_SHARDS, ShardCrew
from nightmill_worker.supervisor import EngineSupervisor

LOOK_AGAIN_S = 2.0  # when no shard was to be had: another process may give one back


class JobFeed:
    """Gives a crew the shards of one job; used by the main thread."""

    def __init__(
        self, crew: ShardCrew, supervisor: EngineSupervisor, context: JobContext, drain: Drain, worker_id: str
    ) -> None:
        self._crew = crew
        self._supervisor = supervisor
        self._context = context
        self._drain = drain
        self._worker_id = worker_id
        self._stopping = False
        self._look_at = 0.0  # not before, unless a shard ends here

    @property
    def job(self) -> JobInfo:
        """As it stood when the run began."""
        return self._context.job

    def take_turn(self) -> bool:
        """Take another shard if there is room; False when none is at work and none to be had.

        Raises:
            NightmillError: A shard failed. The others have stopped and given their leases back.
        """
        for ended in self._crew.gather():
            if ended.failure is not None:
                self.stop()
                raise ended.failure
            self._look_at = 0.0
        while self._has_room() and self._take():
            pass
        if self._look_at and not any(run.is_reading for run in self._crew.active):
            self._supervisor.begin_now()  # nothing more is coming to plan with
        return bool(self._crew.active)

    def stop(self) -> None:
        """Stop every shard, take no other one."""
        self._stopping = True
        self._crew.stop()

    def _has_room(self) -> bool:
        active = self._crew.active
        if self._stopping or self._drain.requested or len(active) >= MAX_SHARDS or self._crew.solitude.is_wanted:
            return False
        if active and time.monotonic() < self._look_at:
            return False
        return self._supervisor.has_room and not any(run.is_reading for run in active)

    def _take(self) -> bool:
        store = self._context.store
        for shard_id in store.available_shards(1, self._context.job.job_id):
            lease = store.claim(shard_id, self._worker_id)
            if lease is None:
                return True  # somebody was faster: look again
            failpoint("after_claim")
            self._crew.start(lease, self._context)
            return True
        self._look_at = time.monotonic() + LOOK_AGAIN_S
        return False
