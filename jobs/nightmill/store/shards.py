"""Shards: which may run, which must be closed, what became of them."""

import json
from typing import Any

from sqlalchemy import Connection, Row, Select, case, literal, or_, select, update

from nightmill.errors import FencedError
from nightmill.failpoint import failpoint
from nightmill.records import CommittedShard, RowCounts, ShardLease, ShardRange, ShardResult, TokenCounts
from nightmill.schema import jobs, shards
from nightmill.states import TERMINAL_SHARD, ShardState, Tier
from nightmill.store.clock import now
from nightmill.store.leases import may_run, must_close

_tier_rank = case({tier.value: tier.rank for tier in Tier}, value=jobs.c.tier)
_CLOSINGS = (ShardState.CANCELLED, ShardState.EXPIRED, ShardState.DISCARDED)  # the first that holds is the reason


def available_shards(connection: Connection, limit: int, job_id: str | None) -> list[int]:
    """Ids that `claim` would grant now: by tier, then oldest job, then file order."""
    query = _available(select(shards.c.shard_id), job_id).where(may_run())
    return list(connection.scalars(query.limit(limit)))


def due_for_closing(connection: Connection, limit: int, job_id: str | None) -> list[tuple[int, ShardState]]:
    """Shards that nobody holds and nobody may run, each with the state its closer's commit lands in."""
    conditions = {reason: must_close(reason) for reason in _CLOSINGS}
    reason = case(*((condition, literal(reason.value)) for reason, condition in conditions.items()))
    query = _available(select(shards.c.shard_id, reason.label("reason")), job_id).where(or_(*conditions.values()))
    return [(row.shard_id, ShardState(row.reason)) for row in connection.execute(query.limit(limit))]


def _available(query: Select[Any], job_id: str | None) -> Select[Any]:
    query = query.join_from(shards, jobs).where(shards.c.state == ShardState.AVAILABLE)
    if job_id is not None:
        query = query.where(shards.c.job_id == job_id)
    return query.order_by(_tier_rank, jobs.c.created_at, jobs.c.job_id, shards.c.shard_index)


def commit(connection: Connection, lease: ShardLease, result: ShardResult) -> None:
    """Make a shard terminal: `committed`, or what its closer's lease says.

    Raises:
        FencedError: the lease was lost; the shard belongs to another attempt.
        ValueError: the counts do not add up to the shard's rows.
    """
    rows = result.rows
    if not rows.total == rows.completed + rows.failed + rows.cancelled == lease.range.num_rows:
        raise ValueError(f"shard {lease.range.index} of {lease.job_id} has {lease.range.num_rows} rows, not {rows}")
    final = lease.close_as or ShardState.COMMITTED
    committed = connection.execute(
        update(shards)
        .where(
            shards.c.shard_id == lease.shard_id,
            shards.c.state == ShardState.LEASED,
            shards.c.attempt == lease.attempt,
            shards.c.worker_id == lease.worker_id,
        )
        .values(
            state=final,
            worker_id=None,
            claim_token=None,
            close_as=None,
            lease_expires_at=None,
            **_result_values(result),
        )
        .returning(shards.c.shard_id)
    ).first()
    if committed is None:
        _check_fence(connection, lease, final, result)
    failpoint("before_commit")


def _result_values(result: ShardResult) -> dict[str, Any]:
    return {
        "rows_running": 0,
        "rows_durable": result.rows.total,
        "rows_completed": result.rows.completed,
        "rows_failed": result.rows.failed,
        "rows_cancelled": result.rows.cancelled,
        "rows_resumed": result.rows_resumed,
        "rows_recomputed": result.rows_recomputed,
        "prompt_tokens": result.tokens.prompt,
        "completion_tokens": result.tokens.completion,
        "cached_tokens": result.tokens.cached,
        "error_codes": json.dumps(result.error_codes, sort_keys=True) if result.error_codes else None,
        "part_uri": result.part_uri,
        "part_bytes": result.part_bytes,
        "part_etag": result.part_etag,
        "progress_at": now(),
    }


def _check_fence(connection: Connection, lease: ShardLease, final: ShardState, result: ShardResult) -> None:
    """Pass when the same commit took effect before (its answer was lost); else somebody else has the shard."""
    row = connection.execute(select(shards).where(shards.c.shard_id == lease.shard_id)).first()
    if row is not None and (row.state, row.attempt, row.part_uri, row.part_etag) == (
        final,
        lease.attempt,
        result.part_uri,
        result.part_etag,
    ):
        return
    found = "gone" if row is None else f"{row.state}, attempt {row.attempt}"
    raise FencedError(
        f"shard {lease.range.index} of {lease.job_id}: attempt {lease.attempt} of {lease.worker_id} lost its lease"
        f" (the shard is {found}); nothing was recorded"
    )


def shard_results(connection: Connection, job_id: str) -> list[CommittedShard]:
    """The terminal shards of a job, in file order."""
    query = select(shards).where(shards.c.job_id == job_id, shards.c.state.in_(TERMINAL_SHARD))
    return [_committed(row) for row in connection.execute(query.order_by(shards.c.shard_index))]


def _committed(row: Row[Any]) -> CommittedShard:
    return CommittedShard(
        shard_id=row.shard_id,
        range=ShardRange(
            index=row.shard_index, source_file=row.source_file, row_start=row.row_start, row_end=row.row_end
        ),
        state=ShardState(row.state),
        attempt=row.attempt,
        result=ShardResult(
            rows=RowCounts(
                total=row.row_end - row.row_start,
                completed=row.rows_completed,
                failed=row.rows_failed,
                cancelled=row.rows_cancelled,
            ),
            tokens=TokenCounts(prompt=row.prompt_tokens, completion=row.completion_tokens, cached=row.cached_tokens),
            error_codes=json.loads(row.error_codes) if row.error_codes else {},
            part_uri=row.part_uri,
            part_bytes=row.part_bytes,
            part_etag=row.part_etag,
            rows_resumed=row.rows_resumed,
            rows_recomputed=row.rows_recomputed,
        ),
    )
