"""Ctrl-C, once and more often."""

import os
import signal

import pytest

from nightmill_worker.drain import Drain, InterruptedRunError


def test_one_signal_asks_two_insist() -> None:
    drain = Drain()
    with drain.signals():
        assert not drain.requested
        os.kill(os.getpid(), signal.SIGINT)
        assert drain.requested
        assert not drain.at_once
        os.kill(os.getpid(), signal.SIGTERM)
        assert drain.at_once
    assert drain.number == signal.SIGINT


def test_the_grace_time_ends() -> None:
    drain = Drain(grace_s=0)
    drain.request(signal.SIGTERM)
    assert drain.at_once


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_breaks_what_cannot_be_finished(number: signal.Signals, code: int) -> None:
    drain = Drain()
    with drain.signals(), pytest.raises(InterruptedRunError) as caught, drain.breakable():
        os.kill(os.getpid(), number)
    assert caught.value.exit_code == code


def test_a_signal_before_a_breakable_part_is_not_forgotten() -> None:
    drain = Drain()
    drain.request()
    with pytest.raises(InterruptedRunError), drain.breakable():
        pass


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Drain().signals():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
