import logging
import threading
from dataclasses import replace

import pytest

from nightmill_worker.liveness import EXIT_STUCK, Limits, Pulse, StepClock, Watch, stuck

QUIET = Pulse(main_s=1, heartbeat_s=1, database_s=1, step_s=None, channel_s=1)
LIMITS = Limits(main_s=10, heartbeat_s=10, step_s=10, channel_s=10)


@pytest.mark.parametrize("part", ["main_s", "heartbeat_s", "step_s", "channel_s"])
def test_each_part_may_be_silent_for_so_long(part: str) -> None:
    assert stuck(replace(QUIET, **{part: 10.0}), LIMITS, lambda: True) is None
    reason = stuck(replace(QUIET, **{part: 10.1}), LIMITS, lambda: True)
    assert reason is not None
    assert part.removesuffix("_s") in reason
    assert stuck(replace(QUIET, **{part: None}), LIMITS, lambda: True) is None


def test_a_database_or_a_broker_that_is_away_is_waited_for() -> None:
    assert stuck(replace(QUIET, database_s=1e6), LIMITS, lambda: True) is None
    assert stuck(replace(QUIET, channel_s=1e6), LIMITS, lambda: False) is None


def test_an_engine_without_work_does_not_hang() -> None:
    now = 0.0
    clock = StepClock(lambda: now)
    assert clock.look(5, has_work=True) == 0
    now = 7.0
    assert clock.look(5, has_work=True) == 7
    assert clock.look(5, has_work=False) is None
    now = 9.0
    assert clock.look(5, has_work=True) == 2
    assert clock.look(6, has_work=True) == 0


def test_a_stuck_worker_says_what_it_did_and_exits(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    died: list[int] = []
    done = threading.Event()

    def die(code: int) -> None:
        died.append(code)
        done.set()

    watch = Watch(
        lambda: replace(QUIET, step_s=11.0), lambda: True, lambda: {"shards": [{"shard_id": 42}]}, LIMITS, die=die
    )
    with caplog.at_level(logging.CRITICAL):
        watch.start()
        assert done.wait(30)
        watch.close()
    assert died == [EXIT_STUCK]
    assert "no sign of the step" in caplog.text
    assert "42" in caplog.text
    assert "Thread" in capfd.readouterr().err  # every thread's stack
