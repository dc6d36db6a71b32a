"""Jobs for the tests of the store."""

from dataclasses import replace
from typing import Any

from nightmill.job_id import new_job_id
from nightmill.records import (
    JobInfo,
    JobOptions,
    JobSpec,
    ModelSpec,
    RowCounts,
    ShardLease,
    ShardRange,
    ShardResult,
    SourceFile,
    TokenCounts,
)
from nightmill.spec import spec_digest
from nightmill.states import ShardState
from nightmill.store import Store

SHARD_ROWS = 10
PAST = -1.0  # a lease of this many seconds has run out when it begins: no test waits


def make_spec(**changes: Any) -> JobSpec:
    spec = JobSpec(inputs=("/in/a.parquet",), output="/out", model=ModelSpec(model="demo"))
    return replace(spec, **changes)


def make_ranges(num_shards: int) -> list[ShardRange]:
    return [
        ShardRange(index=i, source_file="/in/a.parquet", row_start=i * SHARD_ROWS, row_end=(i + 1) * SHARD_ROWS)
        for i in range(num_shards)
    ]


def make_job(
    store: Store, num_shards: int = 3, *, output: str = "/out", job_id: str | None = None, **options: Any
) -> JobInfo:
    spec = make_spec(output=output)
    source = SourceFile(uri="/in/a.parquet", num_rows=num_shards * SHARD_ROWS, size_bytes=1000, etag="7-1000")
    return store.create_job(
        job_id or new_job_id(), spec, spec_digest(spec), JobOptions(**options), [source], make_ranges(num_shards)
    )


def make_result(
    lease: ShardLease, *, failed: int = 0, cancelled: int = 0, etag: str = "etag", **changes: Any
) -> ShardResult:
    total = lease.range.num_rows
    result = ShardResult(
        rows=RowCounts(total=total, completed=total - failed - cancelled, failed=failed, cancelled=cancelled),
        tokens=TokenCounts(prompt=100, completion=20, cached=50),
        error_codes={"null_prompt": failed} if failed else {},
        part_uri=f"/out/part-{lease.range.index:05}.parquet",
        part_bytes=1234,
        part_etag=etag,
    )
    return replace(result, **changes)


def claim_first(store: Store, worker_id: str = "w1", ttl_s: float = 30.0) -> ShardLease:
    lease = store.claim(store.available_shards(1)[0], worker_id, ttl_s)
    assert lease is not None
    return lease


def commit_all(store: Store, job_id: str) -> None:
    while ids := store.available_shards(100, job_id):
        for shard_id in ids:
            lease = store.claim(shard_id, "w1")
            assert lease is not None
            store.commit_shard(lease, make_result(lease))


def close_all(store: Store, job_id: str, reason: ShardState) -> int:
    due = store.due_for_closing(100, job_id)
    for shard_id, why in due:
        assert why is reason
        lease = store.claim_for_close(shard_id, why, "closer")
        assert lease is not None
        store.commit_shard(lease, make_result(lease, cancelled=SHARD_ROWS))
    return len(due)


def states(store: Store, job_id: str) -> dict[ShardState, int]:
    return store.job(job_id).num_shards_by_state
