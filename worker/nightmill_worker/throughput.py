"""Rates and the time left, from counters sampled now and then."""

import time
from collections import deque
from collections.abc import Callable

WINDOW_S = 30.0


class Throughput:
    """A sliding window over (time, rows, tokens)."""

    def __init__(self, window_s: float = WINDOW_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._window_s = window_s
        self._clock = clock
        self._samples: deque[tuple[float, int, int]] = deque()

    def sample(self, rows: int, tokens: int) -> None:
        """Record the counters as they stand."""
        now = self._clock()
        self._samples.append((now, rows, tokens))
        while len(self._samples) > 2 and self._samples[1][0] <= now - self._window_s:
            self._samples.popleft()

    @property
    def rows_per_s(self) -> float:
        """Rows finished per second over the window."""
        return self._rate(1)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second over the window."""
        return self._rate(2)

    def eta_s(self, rows_left: int) -> float | None:
        """Seconds for the rows left at the present rate; None while there is none."""
        rate = self.rows_per_s
        return rows_left / rate if rate > 0 else None

    def _rate(self, column: int) -> float:
        if len(self._samples) < 2:
            return 0.0
        first, last = self._samples[0], self._samples[-1]
        elapsed = last[0] - first[0]
        return (last[column] - first[column]) / elapsed if elapsed > 0 else 0.0
