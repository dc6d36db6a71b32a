"""Every look that is repeated all day reads a few rows of an index, however many shards wait."""

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import event, text
from tests.contract.store_jobs import PAST, claim_first, make_job

from nightmill.states import Tier
from nightmill.store import Store

LOOKS: dict[str, Callable[[Store, str], object]] = {
    "available_shards": lambda store, _: store.available_shards(10),
    "available_shards of a job": lambda store, job_id: store.available_shards(1, job_id),
    "claimable_jobs": lambda store, _: store.claimable_jobs(),
    "jobs_to_close": lambda store, _: store.jobs_to_close(),
    "due_for_closing": lambda store, job_id: store.due_for_closing(10, job_id),
    "finalizable_jobs": lambda store, _: store.finalizable_jobs(),
    "begin_finalize": lambda store, job_id: store.begin_finalize(job_id),
    "expire_leases": lambda store, _: store.expire_leases(),
    "has_live_leases": lambda store, job_id: store.has_live_leases(job_id),
    "ring_stale": lambda store, _: store.ring_stale(dict.fromkeys(Tier, 0), after_s=0.0, limit=10),
    "release_dead": lambda store, _: store.release_dead(["w1"]),
}


@pytest.fixture
def busy(store: Store) -> Store:
    """Two jobs of 3,000 shards, a few of them leased, one that has failed before."""
    for _ in range(2):
        make_job(store, 3000)
    for _ in range(20):
        claim_first(store)
    claim_first(store, "dead", PAST)
    store.expire_leases()
    while store.relay_outbox(lambda rings: None, 1000):
        pass
    store._database.write(lambda c: c.execute(text("ANALYZE")))
    return store


@pytest.mark.parametrize("look", LOOKS)
def test_a_look_does_not_read_the_table(busy: Store, look: str) -> None:
    plans = plans_of(busy, lambda: LOOKS[look](busy, busy.jobs(1)[0].job_id))
    assert plans
    read_whole = [plan for plan in plans if "Seq Scan on shards" in plan or "SCAN shards\n" in f"{plan}\n"]
    assert read_whole == []
    assert "ix_shards_" in "".join(plans)


def test_who_is_due_for_a_ring_is_read_in_order_and_not_sorted(busy: Store) -> None:
    plans = plans_of(busy, lambda: busy.ring_stale({Tier.NORMAL: 0}, after_s=0.0, limit=10))
    looks = [plan for plan in plans if "ix_shards_rung" in plan]
    assert looks
    assert not [plan for plan in looks if "Sort" in plan or "TEMP B-TREE" in plan]


def plans_of(store: Store, action: Callable[[], object]) -> list[str]:
    """How the database runs each statement of the action that names shards."""
    seen: list[tuple[str, Any]] = []
    engine = store._database.engine

    def note(_c: object, _cursor: object, statement: str, parameters: Any, *_: object) -> None:
        seen.append((statement, parameters))

    event.listen(engine, "before_cursor_execute", note)
    action()
    event.remove(engine, "before_cursor_execute", note)
    explain = "EXPLAIN QUERY PLAN " if store._database.is_sqlite else "EXPLAIN "
    plans = []
    for statement, parameters in seen:
        # What reads by primary key or sums up a job for `status` is not a look.
        if "shards" in statement and "count(*)" not in statement and "INSERT" not in statement:
            with engine.connect() as connection:
                rows = connection.exec_driver_sql(explain + statement, parameters).all()
            plans.append("\n".join(str(row[-1]) for row in rows))
    return [plan for plan in plans if "error_codes" not in plan]
