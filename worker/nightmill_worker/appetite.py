"""How many rows a worker should have at hand, so that its engine never waits for the object store.

A shard that is taken now gives its first row only after some calls to the store. What the engine finishes until then
must be there already: so the faster the rows and the slower the store, the more shards are begun ahead.
"""

import time
from collections.abc import Callable

from nightmill_worker.supervisor import FeedLimits
from nightmill_worker.throughput import Throughput

LEAST = 4  # times what the engine must have, whatever was measured
MARGIN = 3.0  # rates and latencies are those of a moment ago
LAG_S = 0.5  # until hunger is noticed, and a shard found and claimed
WINDOW_S = 5.0
FORGET_S = 60.0  # a peak rate counts half after this: an engine that starved finished few rows


class Appetite:
    """Used by the main thread. `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._throughput = Throughput(WINDOW_S, clock)
        self._peak = 0.0  # rows a second
        self._looked_at = clock()

    def note(self, rows_run: int) -> None:
        """Rows that the engine has finished so far."""
        now = self._clock()
        self._throughput.sample(rows_run, 0)
        self._peak *= 0.5 ** ((now - self._looked_at) / FORGET_S)
        self._peak = max(self._peak, self._throughput.rows_per_s)
        self._looked_at = now

    def rows_wanted(self, limits: FeedLimits, start_s: float) -> int:
        """Rows without an answer that shards at work should have together.

        Args:
            limits: Of the engine's feed.
            start_s: From the claim of a shard to its first row, as it was lately.
        """
        soon = MARGIN * self._peak * (start_s + LAG_S)
        return min(limits.max_requests, max(LEAST * limits.min_requests, limits.min_requests + int(soon)))
