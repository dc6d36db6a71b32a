"""Rings: owed in the transaction that frees a shard, sent at least once, repeated when nobody hears them."""

from collections.abc import Sequence
from datetime import timedelta

import pytest
from sqlalchemy import Connection, select, update
from tests.contract.store_jobs import PAST, claim_first, close_all, commit_all, make_job

from nightmill.errors import BrokerError
from nightmill.records import Ring
from nightmill.schema import shards
from nightmill.states import ShardState, Tier
from nightmill.store import Store
from nightmill.store.outbox import MAX_DEPTH

EMPTY = dict.fromkeys(Tier, 0)


class Bell:
    """A broker that listens, or is down."""

    def __init__(self) -> None:
        self.heard: list[Ring] = []
        self.batches: list[int] = []
        self.is_down = False

    def publish(self, rings: Sequence[Ring]) -> None:
        self.batches.append(len(rings))
        if self.is_down:
            raise BrokerError("down")
        self.heard += rings

    def take(self) -> list[int]:
        heard, self.heard = [ring.shard_id for ring in self.heard], []
        return heard


@pytest.fixture
def bell() -> Bell:
    return Bell()


def relay_all(store: Store, bell: Bell) -> list[int]:
    while store.relay_outbox(bell.publish, 100):
        pass
    return bell.take()


def age(store: Store, seconds: float) -> None:
    """Let the time since the last ring of every shard be so much longer."""

    def shift(connection: Connection) -> None:
        for shard_id, at in connection.execute(select(shards.c.shard_id, shards.c.rung_at)).all():
            earlier = update(shards).values(rung_at=at - timedelta(seconds=seconds))
            connection.execute(earlier.where(shards.c.shard_id == shard_id))

    store._database.write(shift)


def test_a_job_rings_for_each_shard_in_order(store: Store, bell: Bell) -> None:
    make_job(store, 5)
    ids = store.available_shards(10)
    assert store.num_owed() == 5
    assert relay_all(store, bell) == ids
    assert not store.owes_rings()
    assert relay_all(store, bell) == []


def test_a_job_that_was_there_already_is_not_rung_again(store: Store, bell: Bell) -> None:
    job_id = make_job(store, 3, idempotency_key="k").job_id
    make_job(store, 3, job_id=job_id)
    make_job(store, 3, idempotency_key="k")
    assert store.num_owed() == 3


def test_urgent_rings_go_first_whatever_came_before(store: Store, bell: Bell) -> None:
    for tier in (Tier.LOW, Tier.NORMAL, Tier.HIGH):
        make_job(store, 3, tier=tier)
    assert store.relay_outbox(bell.publish, 4) == 4
    assert [ring.tier for ring in bell.heard] == [Tier.HIGH] * 3 + [Tier.NORMAL]
    assert store.relay_outbox(bell.publish, 100) == 5
    assert [ring.tier for ring in bell.heard[4:]] == [Tier.NORMAL] * 2 + [Tier.LOW] * 3


def test_a_broker_that_is_down_loses_nothing(store: Store, bell: Bell) -> None:
    make_job(store, 3)
    bell.is_down = True
    for _ in range(2):
        with pytest.raises(BrokerError):
            store.relay_outbox(bell.publish, 2)
    assert store.num_owed() == 3
    bell.is_down = False
    assert relay_all(store, bell) == store.available_shards(10)


def test_who_has_been_taken_is_not_rung_for(store: Store, bell: Bell) -> None:
    make_job(store, 3)
    taken = claim_first(store)
    assert relay_all(store, bell) == store.available_shards(10)
    assert taken.shard_id not in bell.take()


def test_a_shard_is_rung_for_once_in_a_batch(store: Store, bell: Bell) -> None:
    make_job(store, 1)
    for _ in range(3):
        lease = claim_first(store)
        store.release(lease, failed=False, progressed=True)
    assert store.num_owed() == 4
    assert relay_all(store, bell) == [lease.shard_id]


@pytest.mark.parametrize("how", ["release", "expire", "die"])
def test_whoever_frees_a_shard_rings_for_it(store: Store, bell: Bell, how: str) -> None:
    make_job(store, 2)
    relay_all(store, bell)
    lease = claim_first(store, "w1", PAST)
    if how == "release":
        store.release(lease, failed=False, progressed=False)
    elif how == "expire":
        store.expire_leases()
    else:
        store.release_dead(["w1"])
    assert relay_all(store, bell) == [lease.shard_id]
    assert not store.release(lease, failed=False, progressed=False)
    assert not store.owes_rings()


def test_what_may_not_run_is_not_rung_for(store: Store, bell: Bell) -> None:
    used_up = make_job(store, 1, max_failures=1).job_id
    relay_all(store, bell)
    store.release(claim_first(store), failed=True, progressed=False)
    cancelled = make_job(store, 1).job_id
    relay_all(store, bell)
    lease = claim_first(store)
    store.cancel(cancelled)
    store.release(lease, failed=False, progressed=False)
    assert store.num_owed() == 0
    assert {store.job(job_id).num_shards_by_state[ShardState.AVAILABLE] for job_id in (used_up, cancelled)} == {1}


def test_a_job_that_ends_takes_its_rings_along(store: Store) -> None:
    """Where nobody relays, the outbox would grow for ever."""
    other = make_job(store, 2).job_id
    job_id = make_job(store, 2, tier=Tier.HIGH).job_id
    commit_all(store, job_id)
    assert store.num_owed() == 4
    store.begin_finalize(job_id)
    store.complete_job(job_id)
    assert store.num_owed() == 2
    store.abandon_job(other, "output_removed", "gone")
    assert store.num_owed() == 0


# Rings that nobody heard


def test_a_wiped_broker_is_rung_again_after_a_while(store: Store, bell: Bell) -> None:
    make_job(store, 3)
    ids = relay_all(store, bell)
    assert store.ring_stale(EMPTY) == 0, "rung just now"
    age(store, 119)
    assert store.ring_stale(EMPTY) == 0
    age(store, 121)
    assert store.ring_stale(EMPTY) == 3
    assert store.ring_stale(EMPTY) == 0
    assert relay_all(store, bell) == ids


def test_a_queue_that_is_merely_long_is_not_flooded(store: Store, bell: Bell) -> None:
    make_job(store, 5, tier=Tier.LOW)
    make_job(store, 2, tier=Tier.HIGH)
    relay_all(store, bell)
    age(store, 10_000)
    assert store.ring_stale({Tier.HIGH: 2, Tier.NORMAL: 0, Tier.LOW: 7}) == 0
    assert store.ring_stale({Tier.HIGH: 2, Tier.NORMAL: 0, Tier.LOW: 3}) == 2
    assert all(ring.tier is Tier.LOW for ring in bell.heard)
    assert store.ring_stale({Tier.HIGH: 0}, limit=1) == 1


def test_what_is_owed_already_is_not_owed_twice(store: Store) -> None:
    """The broker is down: the outbox keeps every ring, and the janitor comes by every few seconds."""
    make_job(store, 3)
    age(store, 10_000)
    assert store.ring_stale(EMPTY) == 0
    assert store.num_owed() == 3


@pytest.mark.parametrize(
    ("num_rings", "age_s", "again"),
    [
        (1, 200, False),
        (1, 250, True),
        (3, 950, False),
        (3, 970, True),
        (5, 3590, False),
        (50, 3590, False),
        (50, 3610, True),
    ],
)
def test_each_ring_in_vain_doubles_the_time_up_to_an_hour(
    store: Store, bell: Bell, num_rings: int, age_s: float, again: bool
) -> None:
    make_job(store, 1)
    relay_all(store, bell)
    for _ in range(num_rings):
        age(store, 3700)
        assert store.ring_stale(EMPTY) == 1
        relay_all(store, bell)
    age(store, age_s)
    assert store.ring_stale(EMPTY) == int(again)


def test_a_shard_that_comes_back_is_rung_again_soon(store: Store, bell: Bell) -> None:
    make_job(store, 1)
    relay_all(store, bell)
    for _ in range(9):
        age(store, 10_000)
        assert store.ring_stale(EMPTY) == 1
        relay_all(store, bell)
    store.release(claim_first(store), failed=False, progressed=True)
    relay_all(store, bell)
    assert store.ring_stale(EMPTY, after_s=60) == 0
    age(store, 61)
    assert store.ring_stale(EMPTY, after_s=60) == 1


def test_behind_a_very_long_queue_nobody_is_rung_for(store: Store, bell: Bell) -> None:
    make_job(store, 2)
    relay_all(store, bell)
    age(store, 10_000)
    assert store.ring_stale({Tier.NORMAL: MAX_DEPTH + 1}) == 0
    assert store.ring_stale({Tier.NORMAL: 1}) == 1


def test_of_each_job_who_waited_longest_is_rung_for_first(store: Store, bell: Bell) -> None:
    make_job(store, 4)
    relay_all(store, bell)
    ids = store.available_shards(10)
    age(store, 200)
    assert store.ring_stale(EMPTY, limit=2) == 2
    relay_all(store, bell)
    age(store, 200)
    assert store.ring_stale(EMPTY, limit=2) == 2
    assert relay_all(store, bell) == ids[2:]


def test_what_must_be_closed_is_not_rung_for_as_stale(store: Store, bell: Bell) -> None:
    job_id = make_job(store, 2).job_id
    relay_all(store, bell)
    age(store, 10_000)
    store.cancel(job_id)
    assert store.ring_stale(EMPTY) == 0
    assert close_all(store, job_id, ShardState.CANCELLED) == 2
