"""The bounded queue of tokenised requests."""

from nightmill.sampling import SamplingParams
from nightmill.states import Tier
from nightmill_worker.engine.request import Request
from nightmill_worker.feed.lookahead import Lookahead

HIGH, NORMAL, LOW = Tier


def requests(ids: range, tokens: int = 10, tier: Tier = NORMAL) -> list[Request]:
    return [
        Request(request_id=i, job_id="j", tier=tier, prompt=(1,) * tokens, sampling=SamplingParams(), seed=0)
        for i in ids
    ]


def ids(entries: list[tuple[int, Request]]) -> list[int]:
    return [request.request_id for _, request in entries]


def test_room_ends_at_either_bound() -> None:
    by_tokens = Lookahead(max_tokens=50, max_requests=100)
    by_tokens.add(0, requests(range(4)))
    assert by_tokens.has_room(NORMAL)
    by_tokens.add(0, requests(range(4, 5)))
    assert not by_tokens.has_room(NORMAL)
    by_count = Lookahead(max_tokens=10_000, max_requests=3)
    by_count.add(0, requests(range(3)))
    assert not by_count.has_room(NORMAL)


def test_what_is_in_the_engine_counts_until_it_has_ended() -> None:
    lookahead = Lookahead(max_tokens=1000, max_requests=3)
    lookahead.add(0, requests(range(3)))
    taken = lookahead.take()
    assert len(lookahead) == 0
    assert not lookahead.has_room(NORMAL)
    lookahead.done(taken[0][1])
    assert lookahead.has_room(NORMAL)
    lookahead.put_back(taken[1:])
    lookahead.withdraw(0)
    assert lookahead.num_tokens(NORMAL) == 0


def test_a_full_tier_holds_up_no_other() -> None:
    lookahead = Lookahead(max_tokens=1000, max_requests=3)
    lookahead.add(0, requests(range(3), tier=LOW))
    assert not lookahead.has_room(LOW)
    assert lookahead.has_room(HIGH)
    lookahead.add(1, requests(range(3, 5), tier=HIGH))
    assert ids(lookahead.take(3)) == [3, 4, 0]


def test_long_prompts_do_not_starve_the_engine() -> None:
    lookahead = Lookahead(max_tokens=50, max_requests=100, min_requests=3)
    lookahead.add(0, requests(range(2), tokens=1000))
    assert lookahead.has_room(NORMAL)
    lookahead.add(0, requests(range(2, 3), tokens=1000))
    assert not lookahead.has_room(NORMAL)


def test_one_prompt_larger_than_the_bound_passes() -> None:
    lookahead = Lookahead(max_tokens=5, max_requests=3)
    assert lookahead.has_room(NORMAL)
    lookahead.add(0, requests(range(1), tokens=1000))
    assert len(lookahead.take(10)) == 1


def test_owners_take_turns() -> None:
    lookahead = Lookahead(max_tokens=1000, max_requests=100)
    lookahead.add(0, requests(range(4)))
    lookahead.add(1, requests(range(10, 12)))
    assert ids(lookahead.take(3)) == [0, 10, 1]
    assert ids(lookahead.take()) == [11, 2, 3]


def test_put_back_comes_first_in_its_order() -> None:
    lookahead = Lookahead(max_tokens=1000, max_requests=100)
    lookahead.add(0, requests(range(4)))
    taken = lookahead.take(2)
    lookahead.put_back(taken)
    assert len(lookahead) == 4
    assert ids(lookahead.take(10)) == [0, 1, 2, 3]


def test_withdraw_takes_one_owner_only() -> None:
    lookahead = Lookahead(max_tokens=1000, max_requests=100)
    lookahead.add(0, requests(range(2)))
    lookahead.add(1, requests(range(2, 4)))
    assert [r.request_id for r in lookahead.withdraw(0)] == [0, 1]
    assert len(lookahead) == 2
    assert ids(lookahead.take(10)) == [2, 3]
