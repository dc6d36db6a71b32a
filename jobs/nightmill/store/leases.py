"""Leases: take, renew, give back, lose. Every write names the state it expects, and the attempt where one holds it."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, and_, case, exists, or_, select, update

from nightmill.records import ShardLease, ShardProgress, ShardRange
from nightmill.schema import jobs, shards
from nightmill.states import JobStatus, ShardState
from nightmill.store.clock import now

LEASE_TTL_S = 30.0
HEARTBEAT_S = 7.0  # under a quarter of the TTL: three in a row may be late

LIVE_JOB = (JobStatus.QUEUED, JobStatus.IN_PROGRESS)
_progressed = shards.c.rows_durable > shards.c.rows_durable_at_claim
_num_failures_after_death = case((_progressed, 0), else_=shards.c.num_failures + 1)
_free: dict[str, Any] = {
    "state": ShardState.AVAILABLE,
    "worker_id": None,
    "claim_token": None,
    "close_as": None,
    "lease_expires_at": None,
    "rows_running": 0,
}


def job_may_run() -> ColumnElement[bool]:
    """A job that is neither stopping nor ended."""
    in_time = or_(jobs.c.expires_at.is_(None), jobs.c.expires_at > now())
    return and_(jobs.c.status.in_(LIVE_JOB), jobs.c.error_code.is_(None), in_time)


def may_run() -> ColumnElement[bool]:
    """A shard and its job: this shard may be computed (not: it is available)."""
    return and_(job_may_run(), shards.c.num_failures < jobs.c.max_failures)


def must_close(reason: ShardState) -> ColumnElement[bool]:
    """A shard and its job: this shard will not be computed any more, for this reason. Its part is still owed."""
    if reason is ShardState.CANCELLED:
        failing = and_(jobs.c.status.in_(LIVE_JOB), jobs.c.error_code.is_not(None))
        return or_(jobs.c.status == JobStatus.CANCELLING, failing)
    if reason is ShardState.EXPIRED:
        return and_(jobs.c.status.in_(LIVE_JOB), jobs.c.expires_at <= now())
    if reason is ShardState.DISCARDED:
        return and_(jobs.c.status.in_(LIVE_JOB), shards.c.num_failures >= jobs.c.max_failures)
    raise ValueError(f"a shard is not closed as {reason}")


def claim(
    connection: Connection,
    shard_id: int,
    worker_id: str,
    ttl_s: float,
    token: str,
    close_as: ShardState | None = None,
) -> ShardLease | None:
    """Lease an available shard; None when it is not to be had. The same token gets the same lease again."""
    condition = may_run() if close_as is None else must_close(close_as)
    taken = connection.execute(
        update(shards)
        .where(
            shards.c.shard_id == shard_id,
            shards.c.state == ShardState.AVAILABLE,
            exists().where(jobs.c.job_id == shards.c.job_id, condition),
        )
        .values(
            state=ShardState.LEASED,
            attempt=shards.c.attempt + 1,
            worker_id=worker_id,
            claim_token=token,
            close_as=close_as,
            lease_expires_at=now(ttl_s),
            rows_durable_at_claim=shards.c.rows_durable,
        )
        .returning(shards)
    ).first()
    if taken is None:
        # Was it ourselves? The answer to a COMMIT can be lost.
        mine = and_(shards.c.shard_id == shard_id, shards.c.claim_token == token, shards.c.worker_id == worker_id)
        taken = connection.execute(select(shards).where(mine, shards.c.state == ShardState.LEASED)).first()
        return None if taken is None else _lease(taken)
    connection.execute(
        update(jobs)
        .where(jobs.c.job_id == taken.job_id, jobs.c.status == JobStatus.QUEUED)
        .values(status=JobStatus.IN_PROGRESS, started_at=now())
    )
    return _lease(taken)


def _lease(row: Row[Any]) -> ShardLease:
    return ShardLease(
        shard_id=row.shard_id,
        job_id=row.job_id,
        range=ShardRange(
            index=row.shard_index, source_file=row.source_file, row_start=row.row_start, row_end=row.row_end
        ),
        attempt=row.attempt,
        num_failures=row.num_failures,
        worker_id=row.worker_id,
        close_as=None if row.close_as is None else ShardState(row.close_as),
    )


def heartbeat(
    connection: Connection, worker_id: str, progress: Mapping[int, ShardProgress], ttl_s: float
) -> frozenset[int]:
    """Renew leases and tell progress; returns the ids that are lost. An expired lease nobody took is still ours."""
    lost = set()
    for shard_id in sorted(progress):  # in one order: two of these must not lock crosswise
        if connection.execute(_renewal(worker_id, shard_id, progress[shard_id], ttl_s)).first() is None:
            lost.add(shard_id)
    return frozenset(lost)


def _renewal(worker_id: str, shard_id: int, progress: ShardProgress, ttl_s: float) -> Any:
    counters = {
        "rows_completed": progress.rows_completed,
        "rows_failed": progress.rows_failed,
        "prompt_tokens": progress.tokens.prompt,
        "completion_tokens": progress.tokens.completion,
        "cached_tokens": progress.tokens.cached,
    }
    moved = or_(*(shards.c[name] != value for name, value in counters.items()))
    grown = shards.c.rows_durable < progress.rows_durable
    return (
        update(shards)
        .where(
            shards.c.shard_id == shard_id,
            shards.c.state == ShardState.LEASED,
            shards.c.worker_id == worker_id,
            shards.c.attempt == progress.attempt,
        )
        .values(
            lease_expires_at=now(ttl_s),
            rows_running=progress.rows_running,
            progress_at=case((moved, now()), else_=shards.c.progress_at),
            rows_durable=case((grown, progress.rows_durable), else_=shards.c.rows_durable),
            num_failures=case((grown, 0), else_=shards.c.num_failures),
            **counters,
        )
        .returning(shards.c.shard_id)
    )


def release(connection: Connection, lease: ShardLease, *, failed: bool, progressed: bool) -> bool:
    """Give a lease back; False when it was lost before. Only a failed attempt without progress is charged."""
    charge = case((_progressed, 0), else_=shards.c.num_failures + int(failed))
    freed = connection.execute(
        update(shards)
        .where(
            shards.c.shard_id == lease.shard_id,
            shards.c.state == ShardState.LEASED,
            shards.c.attempt == lease.attempt,
            shards.c.worker_id == lease.worker_id,
        )
        .values(num_failures=0 if progressed else charge, **_free)
        .returning(shards.c.shard_id)
    )
    return freed.first() is not None


def release_dead(connection: Connection, worker_ids: Sequence[str]) -> int:
    """Take back every lease of workers known to have ended; returns how many."""
    return _take_back(connection, shards.c.worker_id.in_(worker_ids))


def expire_leases(connection: Connection) -> int:
    """Take back every lease whose time has run out; returns how many."""
    return _take_back(connection, shards.c.lease_expires_at < now())


def _take_back(connection: Connection, condition: ColumnElement[bool]) -> int:
    taken = connection.execute(
        update(shards)
        .where(shards.c.state == ShardState.LEASED, condition)
        .values(num_failures=_num_failures_after_death, **_free)
        .returning(shards.c.shard_id)
    )
    return len(taken.all())
