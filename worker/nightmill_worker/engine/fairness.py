"""Who is owed service: guaranteed shares between tiers, even shares between the jobs of a tier.

Service is counted in computed tokens (prefill and decode; cached ones cost nothing). There is no clock in here, so
the same work gives the same decisions.
"""

import heapq
from collections.abc import Collection, Mapping
from types import MappingProxyType

from nightmill.errors import ConfigError
from nightmill.states import Tier

DEFAULT_TIER_SHARES: Mapping[Tier, float] = MappingProxyType({Tier.HIGH: 0.80, Tier.NORMAL: 0.15, Tier.LOW: 0.05})
DEFAULT_WINDOW_TOKENS = 1 << 18
"""How far back a debt reaches, in computed tokens: about 30 full steps of 8,192."""


class TierShares:
    """Deficit accounting between tiers.

    Each computed token is owed to the tiers that wanted service when it was computed, by their shares; an idle tier's
    share flows down to the next tier that wants service (up, when none below does), and is no debt. A tier's deficit
    is what it was owed minus what it got, bounded by its share of two windows: nobody saves up for a year.
    """

    def __init__(
        self, shares: Mapping[Tier, float] = DEFAULT_TIER_SHARES, window_tokens: int = DEFAULT_WINDOW_TOKENS
    ) -> None:
        total = sum(shares.get(tier, 0.0) for tier in Tier)
        if total <= 0 or any(share < 0 for share in shares.values()):
            raise ConfigError(f"tier shares must be at least 0 and not all 0, not {dict(shares)!r}")
        if window_tokens < 1:
            raise ConfigError(f"the window of tier shares must be at least 1 token, not {window_tokens}")
        self._share = {tier: shares.get(tier, 0.0) / total for tier in Tier}
        self._window = window_tokens
        self._deficit = dict.fromkeys(Tier, 0.0)

    def share(self, tier: Tier) -> float:
        """The tier's guaranteed fraction of computed tokens while it has work."""
        return self._share[tier]

    def deficit(self, tier: Tier) -> float:
        """Computed tokens the tier is owed; negative when it got more than its share."""
        return self._deficit[tier]

    def account(self, computed: Mapping[Tier, int], wanting: Collection[Tier]) -> None:
        """Book one step: tokens computed for each tier, and the tiers that had work (running or waiting) in it.

        A tier without work has its debt forgotten: it is owed nothing for the time it asked for nothing.
        """
        owed = self.entitlement([tier for tier in Tier if tier in wanting or computed.get(tier, 0) > 0])
        total = sum(computed.values())
        for tier in Tier:
            if tier not in owed:
                self._deficit[tier] = 0.0
                continue
            limit = self._window * self._share[tier]
            deficit = self._deficit[tier] + owed[tier] * total - computed.get(tier, 0)
            # Twice above: a starving tier goes first from `limit` on, and what it is owed until it is must not be lost.
            self._deficit[tier] = max(-limit, min(2 * limit, deficit))

    def entitlement(self, wanting: Collection[Tier]) -> dict[Tier, float]:
        """The fraction of computed tokens owed to each tier that wants service; they sum to 1 (empty: none wants)."""
        served = [tier for tier in Tier if tier in wanting]
        owed = {tier: self._share[tier] for tier in served}
        flowing = 0.0
        for tier in Tier:
            if tier in owed:
                owed[tier] += flowing
                flowing = 0.0
            else:
                flowing += self._share[tier]
        if served:
            owed[served[-1]] += flowing
        return owed

    def is_below_share(self, tier: Tier) -> bool:
        """True when the tier is owed service: a higher tier may not take its slots or pages now."""
        return self._deficit[tier] > 0.0

    def is_starving(self, tier: Tier) -> bool:
        """True when the tier is owed its whole share of a window: it goes before the higher ones (ageing)."""
        limit = self._window * self._share[tier]
        return limit > 0.0 and self._deficit[tier] >= limit

    def order(self, wanting: Collection[Tier]) -> list[Tier]:
        """The tiers that want service, first to be served first: starving ones, then by rank."""
        return sorted((tier for tier in Tier if tier in wanting), key=lambda t: (not self.is_starving(t), t.rank))

    def may_preempt(self, tier: Tier, victim: Tier) -> bool:
        """True when a waiting request of `tier` may take what a running one of `victim` holds.

        Tiers are compared strictly, never arrivals: two of one tier can never take turns at evicting each other.
        """
        return tier.rank < victim.rank and not self.is_below_share(victim)


class JobShares:
    """Even shares between the jobs of one tier by virtual service: the job that has had least goes next.

    A job that comes (or comes back) starts level with the least served one that is there: it neither jumps a queue of
    credit nor pays for the time before it came.
    """

    def __init__(self) -> None:
        self._served: dict[str, float] = {}  # of the jobs that wait
        self._heap: list[tuple[float, str]] = []  # (served, job); void when served has changed
        self._left: dict[str, float] = {}  # service of jobs that wait no longer, while it is above the floor
        self._floor = 0.0

    def __len__(self) -> int:
        return len(self._served)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._served

    def join(self, job_id: str) -> None:
        """The job has something waiting now."""
        if job_id not in self._served:
            self._set(job_id, max(self._left.pop(job_id, 0.0), self._floor))

    def leave(self, job_id: str) -> None:
        """The job has nothing waiting now."""
        served = self._served.pop(job_id, None)
        if served is not None and served > self._floor:
            self._left[job_id] = served

    def charge(self, job_id: str, tokens: float) -> None:
        """Book service; negative to give back what was booked too much."""
        if job_id in self._served:
            self._set(job_id, self._served[job_id] + tokens)
        elif job_id in self._left:
            self._left[job_id] += tokens

    def next(self) -> str | None:
        """The job that goes next; None when none waits. Ties go to the smaller id."""
        while self._heap:
            served, job_id = self._heap[0]
            if self._served.get(job_id) == served:
                self._raise_floor(served)
                return job_id
            heapq.heappop(self._heap)
        return None

    def _raise_floor(self, served: float) -> None:
        if served > self._floor:
            self._floor = served
            if len(self._left) > 2 * len(self._served) + 64:
                self._left = {job: value for job, value in self._left.items() if value > served}

    def _set(self, job_id: str, served: float) -> None:
        self._served[job_id] = served
        if len(self._heap) > 2 * len(self._served) + 64:
            self._heap = [(value, job) for job, value in self._served.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (served, job_id))
