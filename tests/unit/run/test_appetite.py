"""How many rows a worker wants at hand."""

import pytest

from nightmill_worker.appetite import LAG_S, LEAST, MARGIN, Appetite
from nightmill_worker.supervisor import FeedLimits

LIMITS = FeedLimits.of(64)  # 96 at least, 4,160 at most


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def appetite(clock: Clock, rows_per_s: float, seconds: int = 20) -> Appetite:
    found = Appetite(clock)
    for second in range(seconds):
        clock.now += 1.0
        found.note(int(second * rows_per_s))
    return found


def test_before_anything_was_measured_it_is_the_least() -> None:
    assert Appetite().rows_wanted(LIMITS, 0.0) == LEAST * LIMITS.min_requests


def test_it_covers_what_the_engine_finishes_until_a_shard_has_started() -> None:
    found = appetite(Clock(), 300.0)
    assert found.rows_wanted(LIMITS, 1.0) == pytest.approx(LIMITS.min_requests + MARGIN * 300 * (1.0 + LAG_S), rel=0.01)
    assert found.rows_wanted(LIMITS, 2.0) > found.rows_wanted(LIMITS, 1.0)


def test_it_is_bounded_by_what_the_feed_takes() -> None:
    assert appetite(Clock(), 5000.0).rows_wanted(LIMITS, 10.0) == LIMITS.max_requests


def test_an_engine_that_starved_wants_what_it_wanted_before() -> None:
    clock = Clock()
    found = appetite(clock, 300.0)
    before = found.rows_wanted(LIMITS, 1.0)
    for _ in range(10):
        clock.now += 1.0
        found.note(6000)
    assert found.rows_wanted(LIMITS, 1.0) > 0.85 * before
    for _ in range(600):
        clock.now += 1.0
        found.note(6000)
    assert found.rows_wanted(LIMITS, 1.0) == LEAST * LIMITS.min_requests
