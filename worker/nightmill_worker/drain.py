"""Ctrl-C and SIGTERM: once drains, twice stops at once, three times does not even tidy up.

Drain: admit nothing more, let running sequences finish for a grace time, checkpoint, give the shards back.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from nightmill.errors import ExitCode, NightmillError

GRACE_S = 30.0


class InterruptedRunError(NightmillError):
    """Stopped by a signal; what was finished is kept."""

    code = "interrupted"

    def __init__(self, number: int, message: str | None = None, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint or "Run the same command again to resume.")
        self.exit_code = ExitCode.TERMINATED if number == signal.SIGTERM else ExitCode.INTERRUPTED


class Drain:
    """How urgently to stop. Set by signals, read by every thread."""

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self._signal: int | None = None
        self._count = 0
        self._deadline = float("inf")
        self._breakable = False
        self._event = threading.Event()

    @property
    def number(self) -> int | None:
        """The first signal; None: nobody has asked."""
        return self._signal

    @property
    def grace_s(self) -> float:
        """Seconds that running sequences get."""
        return self._grace_s

    @property
    def requested(self) -> bool:
        """Admit nothing more."""
        return self._event.is_set()

    @property
    def at_once(self) -> bool:
        """Do not wait for running sequences any longer."""
        return self._count > 1 or time.monotonic() > self._deadline

    def request(self, number: int = signal.SIGINT) -> None:
        """What a signal does."""
        self._count += 1
        if self._signal is None:
            self._signal = number
            self._deadline = time.monotonic() + self._grace_s
        self._event.set()
        if self._count > 2:
            os._exit(128 + number)

    def wait(self, timeout_s: float) -> bool:
        """Sleep until a drain is asked for; True when it was."""
        return self._event.wait(timeout_s)

    def check(self) -> None:
        """Raise InterruptedRunError when a drain was asked for: between steps that have nothing to finish."""
        if self._signal is not None:
            raise InterruptedRunError(self._signal)

    @contextmanager
    def signals(self, numbers: Sequence[int] = (signal.SIGINT, signal.SIGTERM)) -> Iterator[None]:
        """Handle these signals inside; main thread only."""

        def handle(number: int, frame: FrameType | None) -> None:
            self.request(number)
            if self._breakable:
                raise InterruptedRunError(number)

        previous = {number: signal.signal(number, handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    @contextmanager
    def breakable(self) -> Iterator[None]:
        """Inside, a signal raises InterruptedRunError in the main thread: nothing is running that could finish."""
        self.check()
        self._breakable = True
        try:
            yield
        finally:
            self._breakable = False
