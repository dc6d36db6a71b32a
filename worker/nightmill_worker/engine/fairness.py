"""Who is owed service: guaranteed shares between tiers, even shares between the jobs of a tier.

Service is counted in computed tokens (prefill and decode; cached ones cost nothing). There is no clock in here, so
the same work gives the same decisions.
"""

import heapq
from collections.abc import Collection, Mapping

from nightmill.errors import ConfigError
from nightmill.states import Tier
from nightmill.tier_weights import DEFAULT_WEIGHTS, TierWeights

DEFAULT_WINDOW_TOKENS = 1 << 18
"""How far back a debt reaches, in computed tokens: about 30 full steps of 8,192."""


class TierShares:
    """Deficit accounting between tiers.

    Each computed token is owed to the tiers that had work when it was computed, by their shares. What a tier has no
    use for flows down to the next that has (up, when none below has), and is no debt. A tier's deficit is what it was
    owed minus what it got.

    Bounds, in shares of the window: a tier is ahead by a fourth at most, so that who had the engine for itself
    gives way for a while without having a claim to keep it; it starves when it is behind by a half, and then goes
    first. With the time until a place comes free it stays within a window: nobody saves up for a year.
    """

    def __init__(self, weights: TierWeights = DEFAULT_WEIGHTS, window_tokens: int = DEFAULT_WINDOW_TOKENS) -> None:
        if window_tokens < 1:
            raise ConfigError(f"the window of tier shares must be at least 1 token, not {window_tokens}")
        self._share = {tier: weights.fraction(tier) for tier in Tier}
        self._window = window_tokens
        self._deficit = dict.fromkeys(Tier, 0.0)

    def share(self, tier: Tier) -> float:
        """The tier's guaranteed fraction of computed tokens while it has work."""
        return self._share[tier]

    def deficit(self, tier: Tier) -> float:
        """Computed tokens the tier is owed; negative when it got more than its share."""
        return self._deficit[tier]

    def account(self, computed: Mapping[Tier, int], wanting: Collection[Tier]) -> None:
        """Book one step.

        Args:
            computed: Tokens computed for each tier.
            wanting: Tiers with work that was not done in it, waiting or running. What one of the others computed
                is all it had: it is owed no more than that. Without any work its debt is forgotten.
        """
        served = [tier for tier in Tier if tier in wanting or computed.get(tier, 0) > 0]
        total = sum(computed.values())
        owed = self._owed(computed, wanting, total)
        if len(served) == 1:
            owed = {served[0]: self._share[served[0]] * total}  # the rest is nobody's: it gets it, and has no claim
        for tier in Tier:
            if tier not in owed:
                self._deficit[tier] = 0.0
                continue
            limit = self._window * self._share[tier]
            deficit = self._deficit[tier] + owed[tier] - computed.get(tier, 0)
            # Twice above: what it is owed between starving and being served must not be lost.
            self._deficit[tier] = max(-limit / 4, min(2 * limit, deficit))

    def entitlement(self, wanting: Collection[Tier]) -> dict[Tier, float]:
        """The fraction of computed tokens owed to each tier that wants service; they sum to 1 (empty: none wants)."""
        return self._owed({}, wanting, 1.0)

    def _owed(self, computed: Mapping[Tier, int], wanting: Collection[Tier], total: float) -> dict[Tier, float]:
        owed: dict[Tier, float] = {}
        flowing = 0.0
        for tier in Tier:
            flowing += self._share[tier] * total
            if tier in wanting:
                owed[tier], flowing = flowing, 0.0
            elif got := computed.get(tier, 0):
                owed[tier] = min(flowing, got)
                flowing -= owed[tier]
        for tier in reversed(owed):
            use = flowing if tier in wanting else min(flowing, computed.get(tier, 0) - owed[tier])
            owed[tier] += use
            flowing -= use
        return owed

    def is_below_share(self, tier: Tier) -> bool:
        """True when the tier is owed service: a higher tier may not take its slots or pages now."""
        return self._deficit[tier] > 0.0

    def is_starving(self, tier: Tier) -> bool:
        """True when the tier is owed half its share of a window: it goes before the higher ones (ageing)."""
        limit = self._window * self._share[tier]
        return limit > 0.0 and self._deficit[tier] >= limit / 2

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
