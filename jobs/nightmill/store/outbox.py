"""The outbox: rings that are owed, written in the transaction that frees a shard, deleted in the one that sends them.

At least once by design: a ring too many finds its shard taken and is dropped.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, case, delete, exists, func, insert, or_, select, update

from nightmill.failpoint import failpoint
from nightmill.records import Ring
from nightmill.schema import in_state, jobs, outbox, shards
from nightmill.states import ShardState, Tier
from nightmill.store.clock import now
from nightmill.store.leases import may_run

MAX_RING_AFTER_S = 3600.0

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
    messages, and does not flood one whose queue is merely long. Each ring in vain doubles the time to the next.
    """
    num_owed = 0
    for tier in sorted(depths, key=lambda tier: tier.rank):
        num_missing = _num_available(connection, tier) - depths[tier]
        stale = _stale(connection, tier, after_s, min(num_missing, limit - num_owed)) if num_missing > 0 else []
        if stale:
            num_owed += len(stale)
            connection.execute(
                update(shards)
                .where(shards.c.shard_id.in_(stale), in_state(ShardState.AVAILABLE))
                .values(rung_at=now(), num_rings=shards.c.num_rings + 1)
            )
            ring(connection, stale)
    return num_owed


def _num_available(connection: Connection, tier: Tier) -> int:
    query = select(func.count()).select_from(shards).join(jobs)
    query = query.where(in_state(ShardState.AVAILABLE), jobs.c.tier == tier, may_run())
    return connection.scalars(query).one()


def _stale(connection: Connection, tier: Tier, after_s: float, limit: int) -> list[int]:
    owed = exists().where(outbox.c.shard_id == shards.c.shard_id)
    waits: list[float] = [after_s]
    while waits[-1] < MAX_RING_AFTER_S:
        waits.append(min(2 * waits[-1], MAX_RING_AFTER_S))
    wait = case(dict(enumerate(waits)), value=shards.c.num_rings, else_=waits[-1])
    query = (
        select(shards.c.shard_id)
        .join_from(shards, jobs)
        .where(in_state(ShardState.AVAILABLE), jobs.c.tier == tier, may_run(), ~owed)
        .where(or_(shards.c.rung_at.is_(None), shards.c.rung_at <= now(-wait)))
        .order_by(shards.c.rung_at, shards.c.shard_id)
        .limit(limit)
    )
    return list(connection.scalars(query.with_for_update(of=shards, skip_locked=True)))


def owes(connection: Connection) -> bool:
    """Whether a ring is owed."""
    return connection.scalar(select(outbox.c.outbox_id).limit(1)) is not None


def count(connection: Connection) -> int:
    """Rings that are owed."""
    return connection.scalars(select(func.count()).select_from(outbox)).one()
