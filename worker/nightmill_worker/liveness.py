"""Alive means: it gets on. A worker that does not says what it was doing, and exits so that it is started again.

A store or a broker that is away is not the worker's fault: it waits for them.
"""

import faulthandler
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

log = logging.getLogger(__name__)

WATCH_S = 1.0
EXIT_STUCK = 70  # EX_SOFTWARE


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """Seconds since each part of a worker last got on; None: it has nothing to do now."""

    main_s: float | None
    """The main thread's last turn."""
    heartbeat_s: float | None
    """The heartbeat thread's last turn, whether the store answered or not."""
    database_s: float | None
    """The store's last answer to it."""
    step_s: float | None
    """The engine's last step, while it has work."""
    channel_s: float | None
    """The last sign of the broker's channel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Silence that means: stuck. The store's own retries take up to a minute a call."""

    main_s: float = 300.0
    heartbeat_s: float = 180.0
    step_s: float = 660.0
    channel_s: float = 300.0  # only while the broker can be reached


def stuck(pulse: Pulse, limits: Limits, broker_is_up: Callable[[], bool]) -> str | None:
    """What is stuck, in words; None: nothing."""
    for name, limit_s in asdict(limits).items():
        silent_s: float | None = getattr(pulse, name)
        if silent_s is not None and silent_s > limit_s and (name != "channel_s" or broker_is_up()):
            return f"no sign of the {name.removesuffix('_s')} for {silent_s:.0f} s (limit {limit_s:.0f} s)"
    return None


class StepClock:
    """How long an engine with work has completed no step."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._steps = -1
        self._moved_at = clock()

    def look(self, steps: int, *, has_work: bool) -> float | None:
        """Seconds since the count of steps moved; None while there is nothing to do."""
        if not has_work or steps != self._steps:
            self._steps = steps
            self._moved_at = self._clock()
        return self._clock() - self._moved_at if has_work else None


class Watch:
    """A thread that ends the process when it is stuck."""

    def __init__(
        self,
        look: Callable[[], Pulse],
        broker_is_up: Callable[[], bool],
        state: Callable[[], dict[str, Any]],
        limits: Limits,
        *,
        die: Callable[[int], object] = os._exit,
    ) -> None:
        self._look = look
        self._broker_is_up = broker_is_up
        self._state = state
        self._limits = limits
        self._die = die
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(WATCH_S):
            reason = stuck(self._look(), self._limits, self._broker_is_up)
            if reason is not None:
                log.critical("stuck: %s; state: %s", reason, json.dumps(self._state(), default=str))
                faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)
                self._die(EXIT_STUCK)
                return  # only where dying was replaced
