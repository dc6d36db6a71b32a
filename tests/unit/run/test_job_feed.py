"""Which shard a run takes next, how often it asks the store, and when it knows that nothing more is coming."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from nightmill_worker import job_feed
from nightmill_worker.job_feed import LOOK_AGAIN_S, JobFeed


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`clock.now` is the time that the feed sees."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(job_feed, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.fixture
def crew() -> Any:
    """One whose shards are what the test says: (being read) each."""
    active: list[SimpleNamespace] = []
    return Mock(active=active, gather=Mock(return_value=[]), solitude=SimpleNamespace(is_wanted=False))


def make(crew: Any, shards: list[int]) -> tuple[JobFeed, Any, Any]:
    """A feed over the shards that the store has, which `claim` takes away; starting one makes it an active one."""
    store = Mock()
    store.available_shards.side_effect = lambda limit, job_id: shards[:limit]
    store.claim.side_effect = lambda shard_id, worker_id: shards.remove(shard_id) or SimpleNamespace(shard_id=shard_id)
    crew.start.side_effect = lambda lease, context: crew.active.append(SimpleNamespace(is_reading=True))
    supervisor = Mock(has_room=True)
    context: Any = SimpleNamespace(store=store, job=SimpleNamespace(job_id="job"))
    drain: Any = SimpleNamespace(requested=False)
    return JobFeed(crew, supervisor, context, drain, "worker"), store, supervisor


def test_the_next_shard_is_taken_when_all_others_have_been_read(crew, clock):
    feed, _, supervisor = make(crew, [1, 2])
    feed.take_turn()
    feed.take_turn()
    assert len(crew.active) == 1
    crew.active[0].is_reading = False
    feed.take_turn()
    assert len(crew.active) == 2
    supervisor.begin_now.assert_not_called()  # the second one is still being read


def test_the_engine_begins_when_the_last_shard_has_been_read(crew, clock):
    feed, _, supervisor = make(crew, [1])
    feed.take_turn()
    supervisor.begin_now.assert_not_called()
    crew.active[0].is_reading = False
    feed.take_turn()
    supervisor.begin_now.assert_called()


def test_a_store_without_shards_is_asked_every_now_and_then(crew, clock):
    feed, store, _ = make(crew, [])
    crew.active.append(SimpleNamespace(is_reading=False))
    for _ in range(5):
        feed.take_turn()
    assert store.available_shards.call_count == 1
    clock.now += LOOK_AGAIN_S
    feed.take_turn()
    assert store.available_shards.call_count == 2


def test_a_shard_that_ends_here_may_have_left_one_to_be_had(crew, clock):
    feed, store, _ = make(crew, [])
    crew.active.append(SimpleNamespace(is_reading=False))
    feed.take_turn()
    crew.gather.return_value = [SimpleNamespace(failure=None)]
    feed.take_turn()
    assert store.available_shards.call_count == 2


def test_with_no_shard_at_work_the_store_is_always_asked(crew, clock):
    feed, store, _ = make(crew, [])
    assert not feed.take_turn()
    assert not feed.take_turn()
    assert store.available_shards.call_count == 2


def test_the_engine_does_not_begin_while_there_may_be_shards_that_nobody_has_asked_for(crew, clock):
    feed, store, supervisor = make(crew, [1])
    crew.active.append(SimpleNamespace(is_reading=False))
    supervisor.has_room = False
    feed.take_turn()
    store.available_shards.assert_not_called()
    supervisor.begin_now.assert_not_called()
