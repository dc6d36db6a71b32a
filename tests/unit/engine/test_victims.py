"""Who is taken off: tiers strictly, then worth; who is left alone."""

import pytest

from nightmill.states import Tier
from nightmill_worker.engine.options import PreemptionMode
from nightmill_worker.engine.victims import MAX_PREEMPTIONS, VictimChooser

HIGH, NORMAL, LOW = Tier


def run(drill, *requests, steps=3):
    drill.add(*requests)
    for _ in range(steps):
        drill.step()


def chooser(drill):
    return VictimChooser(drill.loop.table, drill.loop.pool)


def chosen(drill, row):
    return None if row is None else drill.loop.table.sequence(row).request.request_id


def for_memory(drill, **options):
    return chosen(drill, chooser(drill).for_memory(**options))


@pytest.fixture
def drill(make_drill):
    return make_drill(page_size=4)


def test_lowest_tier_first_whatever_it_frees(drill, make_request):
    run(drill, make_request(1, 40, max_tokens=90, tier=HIGH), make_request(2, 5, max_tokens=30, tier=LOW))
    assert for_memory(drill) == 2


def test_the_one_that_holds_many_pages_for_long(drill, make_request):
    run(
        drill,
        make_request(1, 40, max_tokens=30),
        make_request(2, 40, max_tokens=200),
        make_request(3, 8, max_tokens=30),
    )
    assert for_memory(drill) == 2


def test_shared_pages_free_nothing(drill, make_request):
    prefix = tuple(range(48))
    run(drill, make_request(1, (*prefix, 1), max_tokens=60))
    run(drill, make_request(2, (*prefix, 2), max_tokens=60), make_request(3, 20, max_tokens=60))
    assert for_memory(drill) == 3


def test_pages_beyond_what_is_wanted_do_not_count(drill, make_request):
    """Two pages are enough: the long one would be computed again for nothing."""
    run(
        drill,
        make_request(1, 12, max_tokens=60),
        make_request(2, 12, max_tokens=60),
        make_request(3, 200, max_tokens=60),
    )
    assert for_memory(drill) == 2
    assert for_memory(drill, num_wanted=40) == 3


def test_of_equals_the_latest(drill, make_request):
    run(drill, *(make_request(i, 8, max_tokens=40) for i in range(4)))
    assert for_memory(drill) == 3


def test_nobody_about_to_finish(drill, make_request):
    run(drill, make_request(1, 8, max_tokens=60), make_request(2, 100, max_tokens=6))
    assert for_memory(drill) == 1


def test_nobody_who_has_just_come_back(drill, make_request):
    run(drill, make_request(1, 30, max_tokens=90), make_request(2, 30, max_tokens=90))
    assert for_memory(drill) == 2
    drill.preempt(2)
    for _ in range(60):
        drill.step()
        assert for_memory(drill) == 1
    for _ in range(6):
        drill.step()
    assert for_memory(drill) == 2


def test_nobody_taken_off_three_times(drill, make_request):
    run(drill, make_request(1, 30, max_tokens=200), make_request(2, 30, max_tokens=200))
    for _ in range(MAX_PREEMPTIONS):
        drill.preempt(2)
        drill.step()
    for _ in range(70):
        drill.step()
    assert for_memory(drill) == 1


def test_where_all_are_protected_the_latest_goes_but_only_in_need(drill, make_request):
    run(drill, make_request(1, 8, max_tokens=6), make_request(2, 8, max_tokens=6))
    assert for_memory(drill) == 2
    assert for_memory(drill, is_urgent=False) is None


def test_who_runs_alone_is_nobodys_victim(drill, make_request):
    run(drill, make_request(1, 8, max_tokens=30))
    assert for_memory(drill) is None


def test_tiers_give_in_the_order_asked_and_not_the_protected(drill, make_request):
    run(
        drill,
        make_request(1, 8, max_tokens=60, tier=NORMAL),
        make_request(2, 8, max_tokens=60, tier=LOW),
        make_request(3, 8, max_tokens=6, tier=LOW),
    )
    victims = chooser(drill)
    assert chosen(drill, victims.for_tier([LOW.rank, NORMAL.rank])) == 2
    assert chosen(drill, victims.for_tier([NORMAL.rank])) == 1
    drill.preempt(2, PreemptionMode.RECOMPUTE)
    assert chosen(drill, victims.for_tier([LOW.rank, NORMAL.rank])) == 1
    assert victims.for_tier([HIGH.rank]) is None


def test_freeable_pages_leave_out_the_protected_and_the_shared(drill, make_request):
    prefix = tuple(range(8))
    run(drill, make_request(1, (*prefix, 1), max_tokens=60, tier=LOW), steps=1)
    run(
        drill,
        make_request(2, (*prefix, 2), max_tokens=60, tier=LOW),
        make_request(3, 8, max_tokens=4, tier=LOW),
        steps=1,
    )
    assert chooser(drill).num_freeable([LOW.rank]) == 2
    assert chooser(drill).num_freeable([NORMAL.rank]) == 0
