"""A more urgent request takes what it needs from lower tiers, at once, while they have their share."""

import random

import pytest

from nightmill.states import Tier
from nightmill_worker.engine.options import PreemptionMode

HIGH, NORMAL, LOW = Tier
MODES = [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE]


@pytest.fixture(params=MODES)
def make_engine(request, make_drill):
    def make(**options):
        return make_drill(**{"page_size": 4, "num_host_pages": 200, "preemption": request.param, **options})

    return make


def running(drill):
    table = drill.loop.table
    return {table.sequence(row).request.request_id for row in table.rows().tolist()}


def test_high_gets_a_slot_in_the_next_step(make_engine, make_request):
    drill = make_engine(max_num_seqs=4)
    drill.add(*(make_request(i, 8, max_tokens=60, tier=LOW) for i in range(6)))
    for _ in range(5):
        drill.step()
    drill.add(make_request(9, 8, max_tokens=10, tier=HIGH))
    drill.step()
    assert running(drill) == {0, 1, 2, 9}
    assert drill.loop.stats().preemptions_tier == 1
    drill.drain()
    assert drill.loop.stats().preemptions == 1


def test_high_gets_pages_in_the_next_step(make_engine, make_request):
    drill = make_engine(max_num_seqs=8, num_pages=25)
    drill.add(*(make_request(i, 16, max_tokens=60, tier=LOW) for i in range(3)))
    for _ in range(5):
        drill.step()
    drill.add(make_request(9, 40, max_tokens=6, tier=HIGH))
    drill.step()
    assert 9 in running(drill)
    assert drill.loop.stats().preemptions_tier > 0
    drill.drain()


def test_nobody_takes_from_its_own_tier_or_a_higher_one(make_engine, make_request):
    drill = make_engine(max_num_seqs=2)
    drill.add(make_request(1, 8, max_tokens=30, tier=HIGH), make_request(2, 8, max_tokens=30, tier=NORMAL))
    drill.step()
    drill.add(make_request(3, 8, max_tokens=30, tier=NORMAL), make_request(4, 8, max_tokens=30, tier=LOW))
    for _ in range(10):
        drill.step()
    assert running(drill) == {1, 2}
    drill.drain()
    assert drill.loop.stats().preemptions == 0


def test_low_gives_before_normal(make_engine, make_request):
    drill = make_engine(max_num_seqs=2)
    drill.add(make_request(1, 8, max_tokens=30, tier=NORMAL), make_request(2, 8, max_tokens=30, tier=LOW))
    drill.step()
    drill.add(make_request(3, 8, max_tokens=30, tier=HIGH))
    drill.step()
    assert running(drill) == {1, 3}
    drill.drain()


def test_a_tier_below_its_share_keeps_what_it_has(make_engine, make_request):
    drill = make_engine(max_num_seqs=2)
    drill.add(make_request(1, 8, max_tokens=30, tier=LOW), make_request(2, 8, max_tokens=30, tier=LOW))
    drill.step()
    drill.loop.shares.account({HIGH: 160}, [HIGH, LOW])  # low is owed a fifth of it: normal's share too
    drill.add(make_request(3, 8, max_tokens=30, tier=HIGH))
    for _ in range(5):
        drill.step()
    assert running(drill) == {1, 2}
    for _ in range(8):
        drill.step()
    assert 3 in running(drill)
    drill.drain()


def test_a_request_that_victims_would_not_help_takes_none(make_engine, make_request):
    """The pool is full of protected rows: what the others have would not be enough, so they keep it."""
    drill = make_engine(max_num_seqs=4, num_pages=17)
    drill.add(make_request(1, 40, max_tokens=4, tier=LOW), make_request(2, 8, max_tokens=30, tier=LOW))
    drill.step()
    drill.add(make_request(3, 50, max_tokens=4, tier=HIGH))
    drill.step()
    assert drill.loop.stats().preemptions_tier == 0
    drill.drain()


def test_one_step_takes_a_fourth_of_the_slots_at_most(make_engine, make_request):
    drill = make_engine(max_num_seqs=8)
    drill.add(*(make_request(i, 8, max_tokens=60, tier=LOW) for i in range(8)))
    drill.step()
    drill.add(*(make_request(100 + i, 4, max_tokens=60, tier=HIGH) for i in range(6)))
    drill.step()
    assert drill.loop.stats().preemptions_tier == 2
    drill.step()
    assert drill.loop.stats().preemptions_tier == 4
    drill.drain()


@pytest.mark.parametrize("seed", range(12))
def test_tier_storms_lose_nothing(make_engine, make_request, seed):
    rng = random.Random(seed)
    drill = make_engine(
        max_num_seqs=rng.choice([1, 2, 5]),
        num_pages=rng.choice([17, 40, 200]),
        num_host_pages=rng.choice([0, 10, 200]),
        enable_prefix_caching=rng.random() < 0.7,
        max_num_batched_tokens=rng.choice([5, 9, 64]),
    )
    prefix = tuple(range(20))
    for i in range(40):
        prompt = (*prefix[: rng.choice([0, 4, 11, 20])], *(rng.randrange(1000) for _ in range(rng.randint(1, 12))))
        tier = rng.choice([HIGH, NORMAL, LOW, LOW, LOW])
        drill.add(make_request(i, prompt, max_tokens=rng.randint(1, 24), tier=tier, temperature=float(i % 2)))
        for _ in range(rng.randint(0, 3)):
            drill.step()
    answers = drill.drain()
    assert all(answer.finish_reason == "length" for answer in answers.values())
