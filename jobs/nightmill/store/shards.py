"""Shards: which may run, which must be closed, what became of them."""

import json
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, and_, case, literal, or_, select, update

from nightmill.errors import FencedError
from nightmill.failpoint import failpoint
from nightmill.records import CommittedShard, RowCounts, ShardLease, ShardRange, ShardResult, TokenCounts
from nightmill.schema import in_state, jobs, shards
from nightmill.states import TERMINAL_JOB, TERMINAL_SHARD, JobStatus, ShardState, Tier
from nightmill.store.clock import now
from nightmill.store.leases import budget_is_used_up, has_available, held, job_may_run, job_must_stop, must_close

_tier_rank = case({tier.value: tier.rank for tier in Tier}, value=jobs.c.tier)
OPEN_JOB = tuple(sorted(frozenset(JobStatus) - TERMINAL_JOB))
_CLOSINGS = (ShardState.CANCELLED, ShardState.EXPIRED, ShardState.DISCARDED)  # the first that holds is the reason


def available_shards(connection: Connection, limit: int, job_id: str | None, tier: Tier | None) -> list[int]:
    """Ids that `claim` would grant now: by tier, then oldest job, then file order."""
    has_one = and_(job_may_run(), has_available(shards.c.num_failures < jobs.c.max_failures))
    if tier is not None:
        has_one = and_(has_one, jobs.c.tier == tier)
    found: list[int] = []
    for job in _jobs_with(connection, has_one, limit, job_id):
        query = (
            select(shards.c.shard_id)
            .where(shards.c.job_id == job.job_id, in_state(ShardState.AVAILABLE))
            .where(shards.c.num_failures < job.max_failures)
        )
        found += connection.scalars(query.order_by(shards.c.shard_index).limit(limit - len(found)))
        if len(found) >= limit:
            break
    return found


def due_for_closing(connection: Connection, limit: int, job_id: str | None) -> list[tuple[int, ShardState]]:
    """Shards that nobody holds and nobody may run, each with the state its closer's commit lands in."""
    conditions = {reason: must_close(reason) for reason in _CLOSINGS}
    reason = case(*((condition, literal(reason.value)) for reason, condition in conditions.items()))
    found: list[tuple[int, ShardState]] = []
    for job in _jobs_with(connection, _has_due(), limit, job_id):
        query = (
            select(shards.c.shard_id, reason.label("reason"))
            .join_from(shards, jobs)
            .where(shards.c.job_id == job.job_id, in_state(ShardState.AVAILABLE), or_(*conditions.values()))
        )
        rows = connection.execute(query.order_by(shards.c.shard_index).limit(limit - len(found)))
        found += [(row.shard_id, ShardState(row.reason)) for row in rows]
        if len(found) >= limit:
            break
    return found


def jobs_to_close(connection: Connection, limit: int) -> list[str]:
    """Jobs that have shards due for closing."""
    return [job.job_id for job in _jobs_with(connection, _has_due(), limit, None)]


def _has_due() -> ColumnElement[bool]:
    """A job with shards due for closing: one that stops and has an available one, or has one that failed too often."""
    stops = or_(job_must_stop(ShardState.CANCELLED), job_must_stop(ShardState.EXPIRED))
    return or_(and_(stops, has_available()), has_available(budget_is_used_up()))


def _jobs_with(
    connection: Connection, condition: ColumnElement[bool], limit: int, job_id: str | None
) -> list[Row[Any]]:
    """Open jobs for which the condition holds, most urgent first.

    Job by job, the shards are read in the order of an index; all at once, each look would sort every available one.
    """
    query = select(jobs.c.job_id, jobs.c.max_failures).where(jobs.c.status.in_(OPEN_JOB), condition)
    if job_id is not None:
        query = query.where(jobs.c.job_id == job_id)
    return list(connection.execute(query.order_by(_tier_rank, jobs.c.created_at, jobs.c.job_id).limit(limit)))


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
        .where(*held(lease))
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
