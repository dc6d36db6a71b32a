"""How many shards of each tier a worker holds at once: the truth about running work, whatever the broker's credit says.

After a reconnect the broker hands out its whole prefetch window again, though the shards of before are still at work.
"""

import threading
import time
from collections.abc import Callable, Mapping

from nightmill.states import Tier

DEFAULT_SLOTS: Mapping[Tier, int] = {Tier.HIGH: 2, Tier.NORMAL: 4, Tier.LOW: 4}


class Slot:
    """A place of one tier. `release` may be called twice and from any thread."""

    def __init__(self, tier: Tier, give_back: Callable[[], None]) -> None:
        self.tier = tier
        self._give_back: Callable[[], None] | None = give_back
        self._lock = threading.Lock()
        self._released = threading.Event()

    def release(self) -> None:
        """Give the place back."""
        with self._lock:
            give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()
            self._released.set()

    def wait_released(self, timeout_s: float) -> bool:
        """Until it was given back; False when the time ran out first."""
        return self._released.wait(timeout_s)


class TierSlots:
    """A bounded number of places for each tier; who waits goes before who only asks."""

    def __init__(self, limits: Mapping[Tier, int]) -> None:
        self.limits = dict(limits)
        self._used = dict.fromkeys(Tier, 0)
        self._waiting = dict.fromkeys(Tier, 0)
        self._changed = threading.Condition()
        self._closed = False

    def wait(self, tier: Tier, deadline: float) -> Slot | None:
        """A place, waiting until `deadline` (monotonic) for one; None when it passed, or after `close`."""
        with self._changed:
            self._waiting[tier] += 1
            try:
                while not self._closed and self._used[tier] >= self.limits.get(tier, 0):
                    if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                        return None
                return None if self._closed else self._take(tier)
            finally:
                self._waiting[tier] -= 1

    def ask(self, tier: Tier) -> Slot | None:
        """A place that nobody holds or waits for, at once."""
        with self._changed:
            if self._closed or self._used[tier] + self._waiting[tier] >= self.limits.get(tier, 0):
                return None
            return self._take(tier)

    def extra(self, tier: Tier) -> Slot:
        """A place beyond the limit: for an engine that would go hungry."""
        with self._changed:
            return self._take(tier)

    def close(self) -> None:
        """Whoever waits gets nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def used(self) -> dict[Tier, int]:
        """Places held, by tier."""
        with self._changed:
            return dict(self._used)

    def _take(self, tier: Tier) -> Slot:
        self._used[tier] += 1
        return Slot(tier, lambda: self._give_back(tier))

    def _give_back(self, tier: Tier) -> None:
        with self._changed:
            self._used[tier] -= 1
            self._changed.notify_all()
