"""Leases are renewed with progress; lost ones and stopped jobs are told."""

from pathlib import Path

import pytest

from nightmill.records import JobOptions, JobSpec, ModelSpec, ShardLease, ShardProgress, ShardRange, SourceFile
from nightmill.store import Store
from nightmill_worker.heartbeat import Heartbeat


class Shard:
    """A held shard that remembers what it was told."""

    def __init__(self, lease: ShardLease) -> None:
        self.lease = lease
        self.progress = ShardProgress(attempt=lease.attempt, rows_completed=3, rows_running=2, rows_durable=1)
        self.told: list[str] = []

    def lose(self) -> None:
        self.told.append("lost")

    def stop_job(self) -> None:
        self.told.append("stop")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(f"sqlite:///{tmp_path / 'store.db'}")
    store.migrate()
    spec = JobSpec(inputs=("in",), output="out", model=ModelSpec(model="m"))
    ranges = [ShardRange(index=i, source_file="in", row_start=10 * i, row_end=10 * i + 10) for i in range(2)]
    store.create_job("job", spec, "digest", JobOptions(), [SourceFile(uri="in", num_rows=20, size_bytes=1)], ranges)
    return store


def hold(store: Store, heartbeat: Heartbeat, worker_id: str = "me") -> Shard:
    lease = store.claim(store.available_shards(1)[0], worker_id)
    assert lease is not None
    shard = Shard(lease)
    heartbeat.hold(shard)
    return shard


def test_progress_reaches_the_store(store: Store) -> None:
    heartbeat = Heartbeat(store, "me")
    hold(store, heartbeat)
    heartbeat.beat()
    job = store.job("job")
    assert (job.rows.completed, job.rows_running) == (3, 2)


def test_a_lost_lease_is_told_and_the_others_are_not(store: Store) -> None:
    heartbeat = Heartbeat(store, "me")
    lost, kept = hold(store, heartbeat), hold(store, heartbeat)
    store.release(lost.lease, failed=False, progressed=False)
    heartbeat.beat()
    assert (lost.told, kept.told) == (["lost"], [])


def test_case_I094_cancel_is_told(store: Store) -> None:
    heartbeat = Heartbeat(store, "me")
    shard = hold(store, heartbeat)
    heartbeat.look_for_stops()
    assert shard.told == []
    store.cancel("job")
    heartbeat.look_for_stops()
    assert shard.told == ["stop"]


def test_a_dropped_shard_is_left_alone(store: Store) -> None:
    heartbeat = Heartbeat(store, "me")
    shard = hold(store, heartbeat)
    heartbeat.drop(shard)
    store.cancel("job")
    heartbeat.beat()
    heartbeat.look_for_stops()
    assert shard.told == []


def test_the_thread_looks_until_it_is_closed(store: Store) -> None:
    turns = iter([False, False, True])
    heartbeat = Heartbeat(store, "me", sleep=lambda _: next(turns))
    shard = hold(store, heartbeat)
    store.cancel("job")
    heartbeat.start().close()
    assert shard.told == ["stop", "stop"]
