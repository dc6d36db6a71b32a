"""How soon an urgent request starts on a busy engine, what the others keep, and who may pass whom."""

import pickle
from collections import Counter

import pytest

from nightmill.states import Tier
from nightmill.tier_weights import TierWeights
from nightmill_worker.engine.drill import Drill
from nightmill_worker.engine.fake import FakeRunnerConfig
from nightmill_worker.engine.options import LoopOptions

HIGH, NORMAL, LOW = Tier


def running(drill):
    table = drill.loop.table
    return {table.sequence(row).request.request_id for row in table.rows().tolist()}


def num_drawn(drill, request_id):
    table = drill.loop.table
    drawn = {table.sequence(row).request.request_id: len(table.generated(row)) for row in table.rows().tolist()}
    return drawn.get(request_id, 0)


def booked(drill):
    """The tokens that are computed for each tier from now on, as they are booked."""
    total, account = Counter(), drill.loop.shares.account

    def book(computed, wanting):
        total.update(computed)
        account(computed, wanting)

    drill.loop.shares.account = book
    return total


@pytest.mark.parametrize("prompt_tokens", [1, 40, 1900, 3000, 3900])
@pytest.mark.parametrize("num_pages", [512, 4096])
def test_high_on_an_engine_full_of_low_starts_in_the_next_step(make_request, prompt_tokens, num_pages):
    """By default options: admitted in the next step, and its first token one interval later.

    An interval is the uncached prompt over the step's budget; the decodes of others come off the budget first.
    """
    drill = Drill(FakeRunnerConfig(num_pages=num_pages), LoopOptions())
    drill.add(*(make_request(i, 30 + i % 20, max_tokens=100, tier=LOW, job_id=f"low-{i % 3}") for i in range(200)))
    for _ in range(20):
        drill.step()
    assert drill.loop.stats().waiting > 100
    drill.add(make_request(1000, prompt_tokens, max_tokens=20, tier=HIGH))
    drill.step()
    assert 1000 in running(drill)
    budget = LoopOptions().max_num_batched_tokens - LoopOptions().max_num_seqs
    for _ in range(-(-prompt_tokens // budget) - 1):
        assert num_drawn(drill, 1000) == 0
        drill.step()
    assert num_drawn(drill, 1000) == 1
    answers = drill.drain()
    assert len(answers) == 201
    assert all(answer.error is None for answer in answers.values())


def test_one_high_request_takes_as_many_victims_as_it_needs_at_once(make_drill, make_request):
    """A step takes a fourth of the slots, two here, but does not stop half way for one request."""
    drill = make_drill(num_pages=61, page_size=4, max_num_seqs=8)
    drill.add(*(make_request(i, 24, max_tokens=60, tier=LOW) for i in range(8)))
    drill.step()
    drill.add(make_request(100, 100, max_tokens=10, tier=HIGH))
    drill.step()
    assert 100 in running(drill)
    assert drill.loop.stats().preemptions_tier > 2
    drill.drain()


def flood(drill, make_request, *, num_steps, low=LOW):
    """Endless short urgent work on top of endless work of a lower tier: tokens computed for each."""
    total = booked(drill)
    for i in range(num_steps):
        while drill.loop.queue.num_ready(HIGH.rank) < 8:
            drill.add(make_request(10 * i + 100_000 + len(drill._requests), 20, max_tokens=12, tier=HIGH))
        while drill.loop.queue.num_ready(low.rank) < 8:
            drill.add(make_request(len(drill._requests), 12, max_tokens=40, tier=low))
        drill.step()
    return total


@pytest.mark.parametrize(
    ("shares", "floor"),
    [
        (TierWeights(), 0.05),
        (TierWeights(high=50, normal=25, low=25), 0.25),
        (TierWeights(high=100, normal=0, low=0), 0.0),
    ],
)
def test_low_keeps_its_share_under_a_flood_of_high(make_drill, make_request, shares, floor):
    drill = make_drill(admission="growth", num_pages=400, max_num_seqs=16, tier_shares=shares, share_window_tokens=2048)
    total = flood(drill, make_request, num_steps=300)
    assert sum(total.values()) > 4 * 2048
    assert total[LOW] >= floor * sum(total.values()) - floor * 2048
    assert total[HIGH] >= shares.fraction(HIGH) * sum(total.values()) - 2048
    if not floor:
        assert total[LOW] < 0.02 * sum(total.values())  # what there was room for in the first steps
    drill.drain()


def test_a_starving_tier_goes_before_higher_ones(make_drill, make_request):
    drill = make_drill(max_num_seqs=1)
    drill.add(make_request(1, 4, max_tokens=3, tier=HIGH))
    drill.step()
    drill.add(make_request(2, 4, max_tokens=3, tier=HIGH), make_request(3, 4, max_tokens=3, tier=LOW))
    drill.loop.shares.account({HIGH: 1 << 20}, [HIGH, LOW])
    ended = []
    while drill.loop.has_work:
        ended += [answer.request_id for answer in drill.step()]
    assert ended == [1, 3, 2]


def test_nobody_takes_the_pages_that_a_starving_tier_waits_for(make_drill, make_request):
    drill = make_drill(num_pages=21, page_size=4, max_num_seqs=8)
    drill.add(make_request(1, 40, max_tokens=20, tier=HIGH))
    drill.step()
    drill.add(make_request(2, 44, max_tokens=3, tier=LOW), make_request(3, 4, max_tokens=3, tier=HIGH))
    drill.loop.shares.account({HIGH: 1 << 20}, [HIGH, LOW])
    ended = []
    while drill.loop.has_work:
        ended += [answer.request_id for answer in drill.step()]
    assert ended[:1] == [1]
    assert set(ended[1:]) == {2, 3}


def test_who_has_borrowed_pages_gives_before_a_tier_that_has_not(make_drill, make_request):
    """Low holds less than its share of the pages, normal more: a high one takes from normal."""
    drill = make_drill(num_pages=101, page_size=4, max_num_seqs=8, max_num_batched_tokens=512)
    drill.add(make_request(1, 12, max_tokens=60, tier=LOW))
    drill.add(*(make_request(i, 90, max_tokens=60, tier=NORMAL) for i in (2, 3, 4)))
    drill.step()
    assert running(drill) == {1, 2, 3, 4}
    drill.add(make_request(5, 100, max_tokens=20, tier=HIGH))
    drill.step()
    assert {1, 5} <= running(drill)
    assert drill.loop.stats().preemptions_tier == 1
    drill.drain()


RULES = [
    {"admission": admission, "order": order}
    for admission in ("growth", "greedy", "reserve")
    for order in ("planned", "arrival")
]


@pytest.mark.parametrize("rules", RULES, ids=lambda rules: "-".join(rules.values()))
def test_case_I055_a_row_that_does_not_fit_blocks_nobody_and_does_not_starve(make_drill, make_request, rules):
    """Row 2 needs nine tenths of the pool; short rows come without end."""
    drill = make_drill(num_pages=101, page_size=4, max_num_seqs=16, max_bypass_tokens=1500, tier_reserve=0.0, **rules)
    drill.add(*(make_request(i, 4 + i, max_tokens=20) for i in range(8)))
    for _ in range(3):
        drill.step()
    drill.add(make_request(1000, 350, max_tokens=10))
    total, next_id, passed = booked(drill), 2000, 0
    while 1000 not in drill.answers:
        while drill.loop.stats().waiting < 6:
            drill.add(make_request(next_id, 3 + next_id % 5, max_tokens=12))
            next_id += 1
        if 1000 in running(drill):
            drill.step()
            continue
        drill.step()
        passed += sum(request_id >= 2000 for request_id in running(drill))
        # Its budget, then what runs has to end.
        assert total[NORMAL] < 1500 + 16 * (8 + 20) + 350 + 256 + 2000
    assert passed > 0
    drill.drain()


def test_case_I055_the_oversized_row_of_a_higher_tier_keeps_lower_tiers_out(make_drill, make_request):
    drill = make_drill(num_pages=101, page_size=4, max_num_seqs=16)
    drill.add(*(make_request(i, 40, max_tokens=20, tier=HIGH) for i in range(6)))
    drill.step()
    drill.add(make_request(1000, 350, max_tokens=10, tier=HIGH), make_request(1001, 3, max_tokens=5, tier=LOW))
    while 1000 not in running(drill):
        drill.step()
        assert 1000 in running(drill) or 1001 not in running(drill)
    drill.drain()


def test_case_I055_who_was_passed_keeps_its_place_when_cancelled_or_preempted(make_drill, make_request):
    drill = make_drill(num_pages=41, page_size=4, max_num_seqs=8)
    drill.add(make_request(1, 60, max_tokens=30))
    drill.step()
    drill.add(*(make_request(i, 120, max_tokens=5) for i in (2, 3, 4)), *(make_request(i, 4) for i in (5, 6)))
    drill.step()
    assert running(drill) == {1, 5, 6}
    drill.cancel(3)
    drill.preempt(5)
    answers = drill.drain()
    assert answers[3].finish_reason == "abort"
    assert sum(answer.finish_reason == "length" for answer in answers.values()) == 5


def test_pages_are_kept_for_high_only_where_it_has_ever_come(make_drill, make_request):
    def most_running(drill, first):
        drill.add(*(make_request(first + i, 60, max_tokens=20, tier=LOW) for i in range(10)))
        drill.step()
        return drill.loop.stats().running

    drill = make_drill(admission="growth", num_pages=101, page_size=4, max_num_batched_tokens=512, tier_reserve=0.3)
    assert most_running(drill, 0) == 5
    drill.drain()
    drill.add(make_request(100, 4, max_tokens=2, tier=HIGH))
    drill.drain()
    assert most_running(drill, 200) == 3
    drill.drain()


def test_options_with_shares_cross_a_process_border():
    options = LoopOptions(tier_shares=TierWeights(high=1, normal=1, low=2))
    assert pickle.loads(pickle.dumps(options)) == options
