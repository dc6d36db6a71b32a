"""Leases: take, renew, give back, lose. Every write names the state it expects, and the attempt where one holds it.

Transactions that lock several shards do so in the order of their ids: two of them never wait crosswise.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, and_, case, exists, func, or_, select, update

from nightmill.records import ShardLease, ShardProgress, ShardRange
from nightmill.schema import has_failed, in_state, jobs, shards
from nightmill.states import JobStatus, ShardState
from nightmill.store.clock import now
from nightmill.store.json_rows import json_rows, number

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
    "rung_at": now(),  # whoever frees a shard rings for it
    "num_rings": 0,
}


def job_may_run() -> ColumnElement[bool]:
    """A job that is neither stopping nor ended."""
    in_time = or_(jobs.c.expires_at.is_(None), jobs.c.expires_at > now())
    return and_(jobs.c.status.in_(LIVE_JOB), jobs.c.error_code.is_(None), in_time)


def may_run() -> ColumnElement[bool]:
    """A shard and its job: this shard may be computed (not: it is available)."""
    return and_(job_may_run(), shards.c.num_failures < jobs.c.max_failures)


def job_must_stop(reason: ShardState) -> ColumnElement[bool]:
    """A job: none of its shards will be computed any more, for this reason. Their parts are still owed."""
    if reason is ShardState.CANCELLED:
        failing = and_(jobs.c.status.in_(LIVE_JOB), jobs.c.error_code.is_not(None))
        return or_(jobs.c.status == JobStatus.CANCELLING, failing)
    if reason is ShardState.EXPIRED:
        return and_(jobs.c.status.in_(LIVE_JOB), jobs.c.expires_at <= now())
    raise ValueError(f"a job does not stop as {reason}")


def budget_is_used_up() -> ColumnElement[bool]:
    """A shard and its job: it has failed too often. The first condition is the one of an index."""
    return and_(has_failed(), shards.c.num_failures >= jobs.c.max_failures, jobs.c.status.in_(LIVE_JOB))


def must_close(reason: ShardState) -> ColumnElement[bool]:
    """A shard and its job: this shard will not be computed any more, for this reason. Its part is still owed."""
    if reason is ShardState.DISCARDED:
        return budget_is_used_up()
    if reason in (ShardState.CANCELLED, ShardState.EXPIRED):
        return job_must_stop(reason)
    raise ValueError(f"a shard is not closed as {reason}")


def has_available(*conditions: ColumnElement[bool]) -> ColumnElement[bool]:
    """A job that has an available shard for which the conditions hold.

    Not EXISTS: PostgreSQL would read every available shard of every job for it. In this order the first one of the
    job's index answers.
    """
    theirs = (shards.c.job_id == jobs.c.job_id, in_state(ShardState.AVAILABLE), *conditions)
    first = select(shards.c.shard_index).where(*theirs).order_by(shards.c.shard_index).limit(1)
    return first.correlate(jobs).scalar_subquery().is_not(None)


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
            in_state(ShardState.AVAILABLE),
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
        .values(status=JobStatus.IN_PROGRESS, started_at=func.coalesce(jobs.c.started_at, now()))
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
        generation=row.generation,
        replaces_etag=row.part_etag,
    )


def heartbeat(
    connection: Connection, worker_id: str, progress: Mapping[int, ShardProgress], ttl_s: float
) -> frozenset[int]:
    """Renew leases and tell progress; returns the ids that are lost. An expired lease nobody took is still ours."""
    if not progress:
        return frozenset()
    _lock(connection, shards.c.shard_id.in_(progress))
    beats = json_rows(connection, json.dumps([_beat(shard_id, progress[shard_id]) for shard_id in progress]))
    counters = {name: number(beats, name) for name in _PROGRESS}
    durable = number(beats, "rows_durable")
    grown = shards.c.rows_durable < durable
    renewed = connection.scalars(
        update(shards)
        .where(
            shards.c.shard_id == number(beats, "shard_id"),
            in_state(ShardState.LEASED),
            shards.c.worker_id == worker_id,
            shards.c.attempt == number(beats, "attempt"),
        )
        .values(
            lease_expires_at=now(ttl_s),
            rows_running=number(beats, "rows_running"),
            progress_at=case(
                (or_(*(shards.c[name] != value for name, value in counters.items())), now()), else_=shards.c.progress_at
            ),
            rows_durable=case((grown, durable), else_=shards.c.rows_durable),
            num_failures=case((grown, 0), else_=shards.c.num_failures),
            **counters,
        )
        .returning(shards.c.shard_id)
    )
    return frozenset(progress) - frozenset(renewed)


_PROGRESS = ("rows_completed", "rows_failed", "prompt_tokens", "completion_tokens", "cached_tokens")


def _beat(shard_id: int, progress: ShardProgress) -> dict[str, int]:
    return {
        "shard_id": shard_id,
        "attempt": progress.attempt,
        "rows_running": progress.rows_running,
        "rows_durable": progress.rows_durable,
        "rows_completed": progress.rows_completed,
        "rows_failed": progress.rows_failed,
        "prompt_tokens": progress.tokens.prompt,
        "completion_tokens": progress.tokens.completion,
        "cached_tokens": progress.tokens.cached,
    }


def renew(connection: Connection, lease: ShardLease, ttl_s: float) -> bool:
    """Keep one lease, say nothing of progress; False when it is lost."""
    renewed = connection.execute(
        update(shards).where(*held(lease)).values(lease_expires_at=now(ttl_s)).returning(shards.c.shard_id)
    )
    return renewed.first() is not None


def excuse(connection: Connection, lease: ShardLease) -> bool:
    """Forget a shard's failures: its search for the row that ends the process gets on. False: the lease is lost."""
    excused = update(shards).where(*held(lease)).values(num_failures=0).returning(shards.c.shard_id)
    return connection.execute(excused).first() is not None


def release(connection: Connection, lease: ShardLease, *, failed: bool, progressed: bool) -> bool:
    """Give a lease back; False when it was lost before. Only a failed attempt without progress is charged."""
    charge = case((_progressed, 0), else_=shards.c.num_failures + int(failed))
    freed = connection.execute(
        update(shards)
        .where(*held(lease))
        .values(num_failures=0 if progressed else charge, **_free)
        .returning(shards.c.shard_id)
    )
    return freed.first() is not None


def give_up_source(connection: Connection, job_id: str, source_file: str) -> int:
    """Use up the budget of every open shard of this input, if together they have failed as often as one of them may."""
    budget = select(jobs.c.max_failures).where(jobs.c.job_id == job_id).scalar_subquery()
    waiting = and_(shards.c.job_id == job_id, shards.c.source_file == source_file, in_state(ShardState.AVAILABLE))
    _lock(connection, waiting)
    failed = select(func.sum(shards.c.num_failures)).where(waiting).scalar_subquery()
    given_up = connection.scalars(
        update(shards)
        .where(waiting, shards.c.num_failures < budget, failed >= budget)
        .values(num_failures=budget)
        .returning(shards.c.shard_id)
    )
    return len(given_up.all())


def release_dead(connection: Connection, worker_ids: Sequence[str]) -> list[int]:
    """Take back every lease of workers known to have ended; returns their shards."""
    theirs = and_(in_state(ShardState.LEASED), shards.c.worker_id.in_(worker_ids))
    # Wait for a row that the dead one's last transaction still holds: nobody comes back for it later.
    return _take_back(connection, theirs, _lock(connection, theirs))


def expire_leases(connection: Connection, limit: int) -> list[int]:
    """Take back leases whose time has run out; returns their shards. One that is just being renewed is left."""
    late = and_(in_state(ShardState.LEASED), shards.c.lease_expires_at < now())
    return _take_back(connection, late, _lock(connection, late, limit=limit, skip_locked=True))


def held(lease: ShardLease) -> tuple[ColumnElement[bool], ...]:
    """The fence: the shard is still this attempt's."""
    return (
        shards.c.shard_id == lease.shard_id,
        in_state(ShardState.LEASED),
        shards.c.attempt == lease.attempt,
        shards.c.worker_id == lease.worker_id,
    )


def _lock(
    connection: Connection, condition: ColumnElement[bool], *, limit: int | None = None, skip_locked: bool = False
) -> list[int]:
    """Ids of the shards, locked in their order (SQLite: the transaction holds the lock of the whole file)."""
    query = select(shards.c.shard_id).where(condition).order_by(shards.c.shard_id).limit(limit)
    return list(connection.scalars(query.with_for_update(skip_locked=skip_locked)))


def _take_back(connection: Connection, condition: ColumnElement[bool], shard_ids: Iterable[int]) -> list[int]:
    taken = connection.scalars(
        update(shards)
        .where(shards.c.shard_id.in_(shard_ids), condition)
        .values(num_failures=_num_failures_after_death, **_free)
        .returning(shards.c.shard_id)
    )
    return list(taken)
