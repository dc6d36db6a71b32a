import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract.store_jobs import SHARD_ROWS, make_job, make_result

from nightmill.closing import close_due, finalize_due
from nightmill.janitor import Sweep, sweep
from nightmill.records import JobInfo, RowCounts, ShardLease, ShardResult
from nightmill.states import JobStatus, ShardState
from nightmill.store import Store
from nightmill.worker_lock import WorkerLock


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(f"sqlite:///{tmp_path / 'store.db'}")
    store.migrate()
    yield store
    store.close()


def close_part(lease: ShardLease, job: JobInfo) -> ShardResult:
    assert lease.job_id == job.job_id
    return make_result(lease, cancelled=SHARD_ROWS)


def claim(store: Store, worker_id: str, ttl_s: float = 30.0) -> ShardLease:
    lease = store.claim(store.available_shards(1)[0], worker_id, ttl_s)
    assert lease is not None
    return lease


def test_the_dead_and_the_silent_lose_their_leases(store: Store, tmp_path: Path) -> None:
    make_job(store, 4)
    workers = tmp_path / "workers"
    workers.mkdir()
    (workers / "dead.lock").touch()  # as kill -9 leaves it
    with WorkerLock(workers, "alive"):
        for worker_id, ttl_s in (("dead", 30), ("alive", 30), ("silent elsewhere", -1), ("elsewhere", 30)):
            claim(store, worker_id, ttl_s)
        assert sweep(store, workers) == Sweep(num_dead=1, num_expired=1)
        assert sweep(store, workers) == Sweep(num_dead=0, num_expired=0)
    assert len(store.available_shards(10)) == 2


def test_a_cancelled_job_is_closed_and_ended(store: Store) -> None:
    job_id = make_job(store, 3).job_id
    other_id = make_job(store, 1, output="/other").job_id
    store.cancel(job_id)
    assert close_due(store, "janitor", close_part, job_id=other_id) == 0
    assert close_due(store, "janitor", close_part, limit=2) == 2
    assert finalize_due(store, lambda job: None) == []
    assert close_due(store, "janitor", close_part) == 1
    assert close_due(store, "janitor", close_part) == 0
    seen: list[JobInfo] = []
    assert finalize_due(store, seen.append) == [job_id]
    assert [job.rows for job in seen] == [RowCounts(total=30, cancelled=30)]
    assert store.job(job_id).status is JobStatus.CANCELLED
    assert store.job(other_id).status is JobStatus.QUEUED


def test_a_closer_that_fails_gives_the_shard_back(store: Store) -> None:
    job_id = make_job(store, 1).job_id
    store.cancel(job_id)

    def fail(_lease: ShardLease, _job: JobInfo) -> ShardResult:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        close_due(store, "janitor", fail)
    assert store.job(job_id).num_shards_by_state == {ShardState.AVAILABLE: 1}
    assert close_due(store, "janitor", close_part) == 1


def test_shards_are_closed_side_by_side(store: Store) -> None:
    store.cancel(make_job(store, 4).job_id)
    together = threading.Barrier(4, timeout=60)

    def meet(lease: ShardLease, job: JobInfo) -> ShardResult:
        together.wait()
        return close_part(lease, job)

    assert close_due(store, "janitor", meet) == 4


def test_after_an_error_what_was_begun_is_brought_to_its_end(store: Store) -> None:
    job_id = make_job(store, 40).job_id
    store.cancel(job_id)

    def fail(lease: ShardLease, job: JobInfo) -> ShardResult:
        if lease.range.index == 3:
            raise OSError("disk full")
        return close_part(lease, job)

    with pytest.raises(OSError, match="disk full"):
        close_due(store, "janitor", fail)
    left = store.job(job_id).num_shards_by_state
    assert set(left) == {ShardState.AVAILABLE, ShardState.CANCELLED}, "no lease is left behind"
    assert close_due(store, "janitor", close_part) == left[ShardState.AVAILABLE]
    assert [shard.attempt for shard in store.shard_results(job_id)][3] == 2


def test_a_slow_closer_yields_to_the_one_that_took_over(store: Store) -> None:
    job_id = make_job(store, 2).job_id
    store.cancel(job_id)
    overtaken: list[int] = []

    def slow(lease: ShardLease, job: JobInfo) -> ShardResult:
        if lease.range.index == 0:
            overtaken.append(lease.shard_id)
            assert store.release(lease, failed=False, progressed=False)
            again = store.claim_for_close(lease.shard_id, ShardState.CANCELLED, "other")
            assert again is not None
            store.commit_shard(again, close_part(again, job))
        return close_part(lease, job)

    assert close_due(store, "janitor", slow) == 1
    assert len(overtaken) == 1
    assert [shard.attempt for shard in store.shard_results(job_id)] == [2, 1]


def test_a_job_whose_finalizer_died_is_ended_by_the_next(store: Store) -> None:
    job_id = make_job(store, 1).job_id
    lease = claim(store, "w")
    store.commit_shard(lease, make_result(lease))

    def die(_: JobInfo) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        finalize_due(store, die)
    assert store.job(job_id).status is JobStatus.FINALIZING
    assert finalize_due(store, lambda job: None) == [job_id]
    assert store.job(job_id).status is JobStatus.COMPLETED
