"""The bounded queue of tokenised requests."""

from nightmill.sampling import SamplingParams
from nightmill.states import Tier
from nightmill_worker.engine.request import Request
from nightmill_worker.feed.lookahead import Lookahead


def requests(ids: range, tokens: int = 10) -> list[Request]:
    return [
        Request(request_id=i, job_id="j", tier=Tier.NORMAL, prompt=(1,) * tokens, sampling=SamplingParams(), seed=0)
        for i in ids
    ]


def ids(entries: list[tuple[int, Request]]) -> list[int]:
    return [request.request_id for _, request in entries]


def test_room_ends_at_either_bound() -> None:
    by_tokens = Lookahead(max_tokens=50, max_requests=100)
    by_tokens.add(0, requests(range(4)))
    assert by_tokens.has_room
    by_tokens.add(0, requests(range(4, 5)))
    assert not by_tokens.has_room
    by_count = Lookahead(max_tokens=10_000, max_requests=3)
    by_count.add(0, requests(range(3)))
    assert not by_count.has_room


def test_one_prompt_larger_than_the_bound_passes() -> None:
    lookahead = Lookahead(max_tokens=5, max_requests=3)
    assert lookahead.has_room
    lookahead.add(0, requests(range(1), tokens=1000))
    assert len(lookahead.take(10)) == 1
    assert lookahead.num_tokens == 0


def test_order_is_kept_over_owners() -> None:
    lookahead = Lookahead(max_tokens=1000, max_requests=100)
    lookahead.add(0, requests(range(2)))
    lookahead.add(1, requests(range(2, 4)))
    lookahead.add(0, requests(range(4, 6)))
    assert ids(lookahead.take(3)) == [0, 1, 2]
    assert ids(lookahead.take(10)) == [3, 4, 5]
    assert lookahead.num_tokens == 0


def test_put_back_comes_first_in_its_order() -> None:
    lookahead = Lookahead(max_tokens=1000, max_requests=100)
    lookahead.add(0, requests(range(4)))
    taken = lookahead.take(2)
    lookahead.put_back(taken)
    assert ids(lookahead.take(10)) == [0, 1, 2, 3]


def test_withdraw_takes_one_owner_only() -> None:
    lookahead = Lookahead(max_tokens=1000, max_requests=100)
    lookahead.add(0, requests(range(2)))
    lookahead.add(1, requests(range(2, 4)))
    assert [r.request_id for r in lookahead.withdraw(0)] == [0, 1]
    assert ids(lookahead.take(10)) == [2, 3]
    assert lookahead.num_tokens == 0
