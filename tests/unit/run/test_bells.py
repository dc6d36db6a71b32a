"""The thread that hears the bells lives as long as the worker, whatever happens to Celery."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from nightmill.errors import BrokerError
from nightmill.states import Tier
from nightmill_worker import bells
from nightmill_worker.bells import Bells
from nightmill_worker.fleet import BellEnd


class Breaks:
    """A WorkController that fails as Celery's does when its shutdown meets an error of its own."""

    made = 0
    heard_again = threading.Event()
    exitcode = 1

    def __init__(self, **_: Any) -> None:
        type(self).made += 1

    def start(self) -> None:
        if self.made > 1:
            self.heard_again.set()
        raise ValueError("not enough values to unpack (expected 3, got 0)")


class Ends:
    """A WorkController that is asked to end at once."""

    started = threading.Event()
    exitcode = 0

    def __init__(self, **_: Any) -> None:
        pass

    def start(self) -> None:
        self.started.set()


def test_a_broker_that_refuses_us_is_asked_now_and_then_with_a_line_each(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bells, "WorkController", Ends)
    monkeypatch.setattr(bells, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(bells.celery_state, "should_stop", None)
    answers = [BrokerError("ACCESS_REFUSED"), BrokerError("ACCESS_REFUSED"), None]
    asked = []

    def declare() -> None:
        assert not Ends.started.is_set()
        asked.append(answer := answers.pop(0))
        if answer is not None:
            raise answer

    pulses: list[int] = []
    ours = make(declare, lambda: pulses.append(1))
    ours.start()
    assert Ends.started.wait(10)
    ours.stop()
    assert ours.join(10)
    assert asked[2] is None
    assert len(pulses) == 2, "else it would be taken for stuck after five minutes"
    assert [record.getMessage().count("ACCESS_REFUSED") for record in caplog.records] == [1, 1]


def make(declare: Callable[[], None], pulse: Callable[[], None] = lambda: None) -> Bells:
    return Bells(
        "memory://",
        "w",
        {Tier.HIGH: 1},
        answer=lambda shard_id, tier: BellEnd.DROPPED,
        ring_again=lambda shard_id, tier: None,
        declare=declare,
        handles=lambda shard_id: False,
        pulse=pulse,
    )


def test_an_error_that_celery_lets_through_does_not_make_the_worker_deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bells, "WorkController", Breaks)
    monkeypatch.setattr(bells, "RESTART_S", 0.0)
    ours = make(lambda: None)
    monkeypatch.setattr(bells.celery_state, "should_stop", None)
    ours.start()
    assert Breaks.heard_again.wait(10), "the thread is gone"
    ours.stop()
    assert ours.join(10)
