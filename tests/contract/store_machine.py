"""Random histories of workers, deaths, closers and cancels against a model of a few lines."""

from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle as HypothesisBundle
from hypothesis.stateful import RuleBasedStateMachine, consumes, initialize, invariant, multiple, precondition, rule
from tests.contract.store_jobs import SHARD_ROWS, make_job, make_result

from nightmill.errors import FencedError, JobStateError
from nightmill.records import ShardLease, ShardProgress
from nightmill.states import JOB_MOVES, TERMINAL_JOB, TERMINAL_SHARD, JobStatus, ShardState
from nightmill.store import Store

WORKERS = ("w1", "w2")


@dataclass
class ModelShard:
    """What the store should think of a shard."""

    state: ShardState = ShardState.AVAILABLE
    attempt: int = 0
    num_failures: int = 0
    durable: int = 0
    durable_at_claim: int = 0
    owner: str | None = None
    out_of_time: bool = False
    etag: str | None = None
    generation: int = 0
    counts: tuple[int, int, int] = (0, 0, 0)  # rows completed, failed, cancelled

    def take_back(self, *, charge: bool) -> None:
        if self.durable > self.durable_at_claim:
            self.num_failures = 0
        elif charge:
            self.num_failures += 1
        self.state, self.owner, self.out_of_time = ShardState.AVAILABLE, None, False


@dataclass
class ModelJob:
    max_failures: int
    status: JobStatus = JobStatus.QUEUED
    failing: bool = False
    generation: int = 0
    shards: dict[int, ModelShard] = field(default_factory=dict)

    @property
    def may_run(self) -> bool:
        return self.status in (JobStatus.QUEUED, JobStatus.IN_PROGRESS) and not self.failing

    def reason_to_close(self, shard: ModelShard) -> ShardState | None:
        if self.status is JobStatus.CANCELLING or self.failing:
            return ShardState.CANCELLED
        return ShardState.DISCARDED if shard.num_failures >= self.max_failures else None


class StoreMachine(RuleBasedStateMachine):
    """Every lease ever granted stays in the hands of some zombie, who may use it at any later time."""

    leases = HypothesisBundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.store = self.open_store()

    def open_store(self) -> Store:
        """One for all examples: each makes its own job."""
        raise NotImplementedError

    @initialize(
        num_shards=st.integers(1, 2),
        max_failures=st.integers(1, 6),
        endings=st.sets(st.sampled_from(["cancel", "fail"])),
    )
    def submit(self, num_shards: int, max_failures: int, endings: set[str]) -> None:
        self.endings = endings  # most histories are about leases
        self.job_id = make_job(self.store, num_shards, max_failures=max_failures).job_id
        self.ids = self.store.available_shards(100, self.job_id)
        self.job = ModelJob(max_failures=max_failures, shards={shard_id: ModelShard() for shard_id in self.ids})

    def _holds(self, lease: ShardLease) -> bool:
        shard = self.job.shards[lease.shard_id]
        return shard.state is ShardState.LEASED and shard.attempt == lease.attempt

    def _granted(self, lease: ShardLease, ttl_s: float) -> None:
        shard = self.job.shards[lease.shard_id]
        shard.state = ShardState.LEASED
        shard.attempt += 1
        shard.owner, shard.out_of_time = lease.worker_id, ttl_s < 0
        shard.durable_at_claim = shard.durable
        assert (lease.attempt, lease.num_failures) == (shard.attempt, shard.num_failures)
        assert (lease.generation, lease.replaces_etag) == (shard.generation, shard.etag)
        if self.job.status is JobStatus.QUEUED:
            self.job.status = JobStatus.IN_PROGRESS

    @rule(
        target=leases, pick=st.integers(0, 1), worker_id=st.sampled_from(WORKERS), ttl_s=st.sampled_from([-1.0, 60.0])
    )
    def claim(self, pick: int, worker_id: str, ttl_s: float) -> object:
        shard_id = self.ids[pick % len(self.ids)]
        shard = self.job.shards[shard_id]
        lease = self.store.claim(shard_id, worker_id, ttl_s)
        can = self.job.may_run and shard.state is ShardState.AVAILABLE and shard.num_failures < self.job.max_failures
        assert (lease is not None) == can
        if lease is None:
            return multiple()
        self._granted(lease, ttl_s)
        assert lease.close_as is None
        return lease

    @rule(target=leases, worker_id=st.sampled_from(WORKERS), ttl_s=st.sampled_from([-1.0, 60.0]))
    def claim_for_close(self, worker_id: str, ttl_s: float) -> object:
        expected = [
            (shard_id, reason)
            for shard_id, shard in self.job.shards.items()
            if shard.state is ShardState.AVAILABLE and (reason := self.job.reason_to_close(shard))
        ]
        due = self.store.due_for_closing(100, self.job_id)
        assert due == expected
        if not due:
            return multiple()
        lease = self.store.claim_for_close(*due[0], worker_id, ttl_s)
        assert lease is not None
        self._granted(lease, ttl_s)
        assert lease.close_as is due[0][1]
        return lease

    @rule(lease=leases, more=st.integers(0, 2), ttl_s=st.sampled_from([-1.0, 60.0]))
    def heartbeat(self, lease: ShardLease, more: int, ttl_s: float) -> None:
        shard = self.job.shards[lease.shard_id]
        durable = min(shard.durable + more, SHARD_ROWS)
        beat = ShardProgress(attempt=lease.attempt, rows_completed=durable, rows_durable=durable)
        lost = self.store.heartbeat(lease.worker_id, {lease.shard_id: beat}, ttl_s)
        assert lost == (frozenset() if self._holds(lease) else {lease.shard_id})
        if not lost:
            shard.out_of_time = ttl_s < 0
            shard.counts = (durable, 0, 0)
            if durable > shard.durable:
                shard.durable, shard.num_failures = durable, 0

    @rule(lease=consumes(leases), failed=st.booleans())
    def release(self, lease: ShardLease, failed: bool) -> None:
        held = self._holds(lease)
        assert self.store.release(lease, failed=failed, progressed=False) == held
        if held:
            self.job.shards[lease.shard_id].take_back(charge=failed)

    @rule(lease=leases, failed_rows=st.integers(0, SHARD_ROWS))
    def commit(self, lease: ShardLease, failed_rows: int) -> None:
        shard = self.job.shards[lease.shard_id]
        etag = f"{lease.attempt}-{failed_rows}"
        cancelled = 0 if lease.close_as is None else SHARD_ROWS - failed_rows
        result = make_result(lease, failed=failed_rows, cancelled=cancelled, etag=etag)
        final = lease.close_as or ShardState.COMMITTED
        repeated = (shard.state, shard.attempt, shard.etag) == (final, lease.attempt, etag)
        if not self._holds(lease) and not repeated:
            with pytest.raises(FencedError):
                self.store.commit_shard(lease, result)
            return
        self.store.commit_shard(lease, result)
        shard.state, shard.owner, shard.out_of_time, shard.etag = final, None, False, etag
        shard.counts = (result.rows.completed, result.rows.failed, result.rows.cancelled)

    @rule()
    def expire(self) -> None:
        due = [s for s in self.job.shards.values() if s.state is ShardState.LEASED and s.out_of_time]
        assert self.store.expire_leases() == len(due)
        for shard in due:
            shard.take_back(charge=True)

    @rule(worker_id=st.sampled_from(WORKERS))
    def die(self, worker_id: str) -> None:
        held = [s for s in self.job.shards.values() if s.owner == worker_id]
        assert self.store.release_dead([worker_id]) == len(held)
        for shard in held:
            shard.take_back(charge=True)

    @precondition(lambda self: "cancel" in self.endings)
    @rule()
    def cancel(self) -> None:
        if JobStatus.CANCELLING in JOB_MOVES[self.job.status]:
            self.job.status = JobStatus.CANCELLING
            self.job.failing = False
        if self.job.status in (JobStatus.CANCELLING, JobStatus.CANCELLED):
            assert self.store.cancel(self.job_id).status is self.job.status
        else:
            with pytest.raises(JobStateError):
                self.store.cancel(self.job_id)

    @precondition(lambda self: "fail" in self.endings)
    @rule()
    def fail(self) -> None:
        self.store.fail_job(self.job_id, "error_budget_exceeded", "too many")
        if self.job.status in (JobStatus.QUEUED, JobStatus.IN_PROGRESS):
            self.job.failing = True

    @rule()
    def finalize(self) -> None:
        shards = self.job.shards.values()
        every = all(shard.state in TERMINAL_SHARD for shard in shards)
        ready = every and self.job.status not in TERMINAL_JOB
        assert self.store.begin_finalize(self.job_id) == ready
        assert (self.job_id in self.store.finalizable_jobs(1000)) == ready
        if not ready:
            return
        if self.job.status is JobStatus.CANCELLING:
            self.job.status = JobStatus.CANCELLED
        elif self.job.failing or all(shard.state is ShardState.DISCARDED for shard in shards):
            self.job.status = JobStatus.FAILED
        else:
            self.job.status = JobStatus.COMPLETED
        self.job.failing = False
        assert self.store.complete_job(self.job_id).status is self.job.status

    @rule()
    def retry(self) -> None:
        if self.job.status not in TERMINAL_JOB:
            with pytest.raises(JobStateError):
                self.store.reset_failed_rows(self.job_id)
            return
        again = [shard for shard in self.job.shards.values() if shard.counts[1] + shard.counts[2]]
        assert self.store.reset_failed_rows(self.job_id) == len(again)
        if not again:
            return
        self.job.generation += 1
        self.job.status = JobStatus.QUEUED
        for shard in self.job.shards.values():
            shard.state = ShardState.COMMITTED
        for shard in again:
            shard.state, shard.generation, shard.num_failures = ShardState.AVAILABLE, self.job.generation, 0
            shard.counts = (shard.counts[0], 0, 0)
            shard.durable = shard.durable_at_claim = shard.counts[0]

    @invariant()
    def the_store_agrees(self) -> None:
        info = self.store.job(self.job_id)
        shards = self.job.shards.values()
        assert (info.status, info.generation) == (self.job.status, self.job.generation)
        states = [shard.state for shard in shards]
        assert info.num_shards_by_state == {state: states.count(state) for state in set(states)}
        completed, failed, cancelled = (sum(column) for column in zip(*(s.counts for s in shards), strict=True))
        assert (info.rows.completed, info.rows.failed, info.rows.cancelled) == (completed, failed, cancelled)
        if info.status in TERMINAL_JOB:
            assert completed + failed + cancelled == info.rows.total
        runnable = [
            shard_id
            for shard_id, shard in self.job.shards.items()
            if self.job.may_run and shard.state is ShardState.AVAILABLE and shard.num_failures < self.job.max_failures
        ]
        assert self.store.available_shards(100, self.job_id) == runnable
        assert self.store.stop_requested([self.job_id]) == (frozenset() if self.job.may_run else {self.job_id})
        etags = [shard.result.part_etag for shard in self.store.shard_results(self.job_id)]
        assert etags == [shard.etag for shard in shards if shard.state in TERMINAL_SHARD]

    def teardown(self) -> None:
        # The next example shares the database: leave no lease for its workers to lose.
        self.store.release_dead(WORKERS)
