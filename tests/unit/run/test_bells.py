"""The thread that hears the bells lives as long as the worker, whatever happens to Celery."""

import threading
from typing import Any

import pytest

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


def test_an_error_that_celery_lets_through_does_not_make_the_worker_deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bells, "WorkController", Breaks)
    monkeypatch.setattr(bells, "RESTART_S", 0.0)
    ours = Bells(
        "memory://",
        "w",
        {Tier.HIGH: 1},
        answer=lambda shard_id, tier: BellEnd.DROPPED,
        ring_again=lambda shard_id, tier: None,
        declare=lambda: None,
        handles=lambda shard_id: False,
        pulse=lambda: None,
    )
    monkeypatch.setattr(bells.celery_state, "should_stop", None)
    ours.start()
    assert Breaks.heard_again.wait(10), "the thread is gone"
    ours.stop()
    assert ours.join(10)
