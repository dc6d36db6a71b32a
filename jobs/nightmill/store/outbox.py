"""The outbox: rings that are owed, written in the transaction that frees a shard, deleted in the one that sends them.

At least once by design: a ring too many finds its shard taken and is dropped.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, delete, exists, func, insert, select, update

from nightmill.failpoint import failpoint
from nightmill.records import Ring
from nightmill.schema import in_state, jobs, outbox, shards
from nightmill.states import ShardState, Tier
from nightmill.store.clock import now
from nightmill.store.leases import has_available, job_may_run, may_run

MAX_RING_AFTER_S = 3600.0
MAX_DEPTH = 10_000  # messages in a queue: with more of them nobody is without a bell

Publish = Callable[[Sequence[Ring]], None]
"""Sends messages; returns when the broker has confirmed all of them, raises otherwise."""


def ring(connection: Connection, shard_ids: Iterable[int]) -> None:
    """Owe a ring for each of the shards that may run."""
    _owe(connection, shards.c.shard_id.in_(shard_ids))


def ring_job(connection: Connection, job_id: str) -> None:
    """Owe a ring for each shard of the job."""
    _owe(connection, shards.c.job_id == job_id)


def _owe(connection: Connection, condition: Any) -> None:
    rings = (
        select(shards.c.shard_id, jobs.c.tier, now())
        .join_from(shards, jobs)
        .where(condition, in_state(ShardState.AVAILABLE), may_run())
        .order_by(shards.c.job_id, shards.c.shard_index)
    )
    connection.execute(insert(outbox).from_select(["shard_id", "tier", "created_at"], rings))


def relay(connection: Connection, publish: Publish, limit: int) -> int:
    """Send the oldest rings of the most urgent tiers and forget them; returns how many were taken from the outbox.

    Those whose shard is not to be had any more are forgotten unsent, and those that another relay is sending are left.
    """
    taken: list[Row[Any]] = []
    for tier in sorted(Tier, key=lambda tier: tier.rank):
        if len(taken) < limit:
            taken += _take(connection, tier, limit - len(taken))
    wanted = {row.shard_id: Tier(row.tier) for row in taken if row.state == ShardState.AVAILABLE}
    if wanted:
        publish([Ring(shard_id=shard_id, tier=tier) for shard_id, tier in wanted.items()])
        failpoint("after_publish")
    if taken:
        connection.execute(delete(outbox).where(outbox.c.outbox_id.in_([row.outbox_id for row in taken])))
    return len(taken)


def _take(connection: Connection, tier: Tier, limit: int) -> list[Row[Any]]:
    query = (
        select(outbox.c.outbox_id, outbox.c.shard_id, outbox.c.tier, shards.c.state)
        .join_from(outbox, shards)
        .where(outbox.c.tier == tier)
        .order_by(outbox.c.outbox_id)
        .limit(limit)
    )
    return list(connection.execute(query.with_for_update(of=outbox, skip_locked=True)))


def forget(connection: Connection, job_id: str) -> None:
    """Drop what is owed for a job that has ended."""
    owed = select(shards.c.shard_id).where(shards.c.job_id == job_id)
    connection.execute(delete(outbox).where(outbox.c.shard_id.in_(owed)))


def ring_stale(connection: Connection, depths: Mapping[Tier, int], after_s: float, limit: int) -> int:
    """Owe another ring for shards that were rung a while ago and that nobody has claimed; returns how many.

    Only as many as the tier's queue is shorter than its available shards: that heals a broker that has lost its
    messages, and does not flood one whose queue is merely long: beyond MAX_DEPTH it is not looked at. Each ring in vain
    doubles the time to the next. Reads at most MAX_DEPTH + `limit` shards of a tier from indexes, however many wait.
    """
    num_owed = 0
    for tier in sorted(depths, key=lambda tier: tier.rank):
        depth, left = depths[tier], limit - num_owed
        if depth > MAX_DEPTH or left <= 0:
            continue
        job_ids = _jobs_of(connection, tier)
        stale = _stale(connection, job_ids, after_s, left)
        num_missing = _num_available(connection, job_ids, depth + len(stale)) - depth if stale else 0
        stale = stale[: max(0, num_missing)]
        for num_rings in sorted({rings for _, rings in stale}):
            _note_rung(connection, [shard_id for shard_id, rings in stale if rings == num_rings], num_rings, after_s)
        if stale:
            num_owed += len(stale)
            ring(connection, [shard_id for shard_id, _ in stale])
    return num_owed


def _jobs_of(connection: Connection, tier: Tier) -> list[str]:
    """Jobs with something to ring for, oldest first."""
    query = select(jobs.c.job_id).where(jobs.c.tier == tier, job_may_run(), has_available())
    return list(connection.scalars(query.order_by(jobs.c.created_at, jobs.c.job_id)))


def _num_available(connection: Connection, job_ids: Sequence[str], limit: int) -> int:
    """Shards that may run, counted up to `limit`."""
    count = 0
    for job_id in job_ids:
        if count >= limit:
            break
        few = select(shards.c.shard_id).where(*_waiting(job_id)).order_by(shards.c.shard_index).limit(limit - count)
        some = few.subquery()
        count += connection.scalars(select(func.count(some.c.shard_id))).one()
    return count


def _stale(connection: Connection, job_ids: Sequence[str], after_s: float, limit: int) -> list[tuple[int, int]]:
    """Shards whose ring is overdue, of each job the longest waiting first, and how often they were rung in vain."""
    owed = exists().where(outbox.c.shard_id == shards.c.shard_id)
    found: list[tuple[int, int]] = []
    for job_id in job_ids:
        if len(found) >= limit:
            break
        query = (
            select(shards.c.shard_id, shards.c.num_rings)
            .where(*_waiting(job_id), ~owed, shards.c.rung_at <= now(-after_s))
            .order_by(shards.c.rung_at)
            .limit(limit - len(found))
        )
        rows = connection.execute(query.with_for_update(of=shards, skip_locked=True))
        found += [(row.shard_id, row.num_rings) for row in rows]
    return found


def _waiting(job_id: str) -> tuple[ColumnElement[bool], ...]:
    """Shards of a job that may run. No join: each look then is a walk along one index."""
    budget = select(jobs.c.max_failures).where(jobs.c.job_id == job_id).scalar_subquery()
    return (shards.c.job_id == job_id, in_state(ShardState.AVAILABLE), shards.c.num_failures < budget)


def _note_rung(connection: Connection, shard_ids: Sequence[int], num_rings: int, after_s: float) -> None:
    """Rung once more, now; the next ring comes twice as late. `rung_at` lies ahead by what that is beyond `after_s`."""
    wait_s = min(after_s * 2.0 ** min(num_rings + 1, 30), max(MAX_RING_AFTER_S, after_s))
    connection.execute(
        update(shards)
        .where(shards.c.shard_id.in_(shard_ids), in_state(ShardState.AVAILABLE))
        .values(rung_at=now(wait_s - after_s), num_rings=shards.c.num_rings + 1)
    )


def owes(connection: Connection) -> bool:
    """Whether a ring is owed."""
    return connection.scalar(select(outbox.c.outbox_id).limit(1)) is not None


def count(connection: Connection) -> int:
    """Rings that are owed."""
    return connection.scalars(select(func.count()).select_from(outbox)).one()
