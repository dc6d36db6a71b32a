"""How long answers get: an online estimate per (job, tier) of the finished lengths, running ones right-censored.

Product-limit (Kaplan–Meier) survival, smoothed inside buckets: the chance to end at a token is the number of rows that
ended there over the number that got there. The prior is min(max_tokens, 256) on average. Requests whose length is known
(`ignore_eos`) need no model.
"""

import itertools
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

PRIOR_MEAN_TOKENS = 256
_PRIOR_WEIGHT = 1.0
"""Pseudo-observations behind the prior. Its mean is far from most jobs': one row's worth, and no more."""
_MEMORY = 4096
"""Finished rows after which the old ones count half: a file may be sorted, so the past is not the future."""
_FINE_TOKENS = 32
_BUCKET_GROWTH = 1.12
_REFIT_GROWTH = 1.0 / 16


_versions = itertools.count()


@dataclass(frozen=True, slots=True)
class Remaining:
    """What sequences still have to generate, one element each, in tokens."""

    mean: Floats
    variance: Floats


class LengthDistribution:
    """Survival of answer lengths, as a table by token: survival[u] = P(length > u), for u in [0, max_tokens]."""

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens`: the longest answer anyone may give; `grow` raises it."""
        self.num_finished = 0
        self.version = next(_versions)
        """Another number whenever the table is another one, of all distributions."""
        self._weight = 0.0  # of the finished rows, after fading
        self._refit_at = 0.0
        self._grow_to(max_tokens)
        self.fit(np.zeros(0, np.int64))

    @property
    def max_tokens(self) -> int:
        """End of the table."""
        return len(self.survival) - 1

    def grow(self, max_tokens: int) -> None:
        """Make room for longer answers."""
        if max_tokens > self.max_tokens:
            finished = self._finished
            self._grow_to(max_tokens)
            self._finished[: len(finished)] = finished
            self._refit_at = 0.0
            self.fit(np.zeros(0, np.int64))

    def observe(self, length: int, *, is_censored: bool = False) -> None:
        """A sequence ended with `length` generated tokens; censored when max_tokens or a cancel ended it."""
        length = min(max(length, 0), self.max_tokens)
        self._at_risk_finished[length] += 1.0
        if not is_censored and length > 0:
            self._finished[length] += 1.0
        self.num_finished += 1
        self._weight += 1.0
        if self._weight >= _MEMORY:
            self._finished *= 0.5
            self._at_risk_finished *= 0.5
            self._weight *= 0.5
            self._refit_at *= 0.5

    def needs_fit(self) -> bool:
        """True when enough rows have finished since the last fit to move the estimate."""
        return self._weight >= self._refit_at

    def fit(self, running: Ints) -> None:
        """Recompute the table from finished rows and the running ones' generated tokens (right-censored)."""
        self.version = next(_versions)
        self._expected: dict[int, int] = {}  # by max_tokens, of this fit
        reached = self._at_risk_finished.copy()
        np.add.at(reached, np.minimum(running, self.max_tokens), 1.0)
        # Tokens u = 1..max: how many rows lived to draw their u-th token.
        at_risk = np.cumsum(reached[::-1])[::-1][1:]
        hazard = (self._finished[1:] + self._prior_deaths) / (at_risk + self._prior_exposure)
        # Exact at the ends of buckets, smooth inside: single lengths are noise.
        log_alive = np.add.reduceat(np.log(np.maximum(1.0 - hazard, 1e-9)), self._starts)
        hazard = -np.expm1(np.repeat(log_alive / self._widths, self._widths))
        hazard[-1] = 1.0  # max_tokens ends whoever is left
        self.survival[0] = 1.0
        np.cumprod(1.0 - hazard, out=self.survival[1:])
        # Below this a conditional mean would be a ratio of rounding errors.
        np.maximum(self.survival[:-1], 1e-9, out=self.survival[:-1])
        # Suffix sums, so that the far tail keeps its relative precision. Index u: sum over [u, max_tokens).
        tail = np.cumsum(self.survival[::-1])[::-1]
        self._sum = tail
        self._moment = np.cumsum((self.survival * np.arange(len(self.survival)))[::-1])[::-1]
        self._refit_at = self._weight + max(1.0, self._weight * _REFIT_GROWTH)

    def remaining(self, generated: Ints, limits: Ints) -> Remaining:
        """Mean and variance of min(length, limit) − generated, given that more than `generated` are to come.

        `limits`: each sequence's own max_tokens. 0 where generated ≥ limit.
        """
        end = np.minimum(limits, self.max_tokens)
        start = np.minimum(generated, end)
        alive = np.maximum(self.survival[start], 1e-12)
        total = self._sum[start] - self._sum[end]
        moment = self._moment[start] - self._moment[end]
        mean = total / alive
        # E[R²] = Σ (2(u − start) + 1)·P(R > u − start).
        square = (2.0 * (moment - start * total) + total) / alive
        return Remaining(mean, np.maximum(square - mean * mean, 0.0))

    def expected(self, max_tokens: int) -> int:
        """Mean length of an answer not yet begun, in whole tokens, ≥ 1. Asked for each request that comes."""
        found = self._expected.get(max_tokens)
        if found is None:
            fresh = np.zeros(1, np.int64)
            found = max(1, round(float(self.remaining(fresh, fresh + max_tokens).mean[0])))
            self._expected[max_tokens] = found
        return found

    def alive_after(self, generated: Ints, steps: Ints, limits: Ints) -> Floats:
        """P(still running after `steps` more tokens), [sequences, steps]; 1 at 0 steps, 0 from the limit on."""
        position = generated[:, None] + steps[None, :]
        alive = self.survival[np.minimum(position, self.max_tokens)]
        alive = alive / np.maximum(self.survival[np.minimum(generated, self.max_tokens)], 1e-12)[:, None]
        return np.where(position >= np.minimum(limits, self.max_tokens)[:, None], 0.0, alive)

    def _grow_to(self, max_tokens: int) -> None:
        at_risk = getattr(self, "_at_risk_finished", np.zeros(0))
        self.survival = np.zeros(max_tokens + 1)
        self._finished = np.zeros(max_tokens + 1)  # by length
        self._at_risk_finished = np.zeros(max_tokens + 1)  # by length, censored ones too
        self._at_risk_finished[: len(at_risk)] = at_risk
        self._starts = _bucket_starts(max_tokens)
        self._widths = np.diff(np.append(self._starts, max_tokens))
        hazard = _prior_hazard(max_tokens)
        # Not 0 where the power underflows.
        self._prior_exposure = np.maximum(_PRIOR_WEIGHT * (1.0 - hazard) ** np.arange(max_tokens), 1e-9)
        self._prior_deaths = hazard * self._prior_exposure


class LengthModel:
    """The distributions of all (job, tier) pairs seen so far."""

    def __init__(self) -> None:
        self._distributions: dict[tuple[str, str], LengthDistribution] = {}

    def distribution(self, job_id: str, tier: str, max_tokens: int) -> LengthDistribution:
        """The pair's distribution, with room for answers of `max_tokens`."""
        found = self._distributions.get((job_id, tier))
        if found is None:
            found = self._distributions[(job_id, tier)] = LengthDistribution(max_tokens)
        else:
            found.grow(max_tokens)
        return found

    def expected(self, job_id: str, tier: str, max_tokens: int) -> int:
        """Predicted length of an answer not yet begun, in tokens, ≥ 1."""
        return self.distribution(job_id, tier, max_tokens).expected(max_tokens)

    def forget_job(self, job_id: str) -> None:
        """Drop what is known of a job that is over."""
        for key in [key for key in self._distributions if key[0] == job_id]:
            del self._distributions[key]


def _bucket_starts(max_tokens: int) -> Ints:
    """Index (token − 1) of the first token of each bucket: single tokens first, then geometric widths."""
    starts = list(range(min(_FINE_TOKENS, max_tokens)))
    edge = float(_FINE_TOKENS)
    while edge < max_tokens:
        starts.append(int(edge))
        edge *= _BUCKET_GROWTH
    return np.array(starts, np.int64)


def _prior_hazard(max_tokens: int) -> float:
    """The constant chance to end at each token that makes min(length, max_tokens) average PRIOR_MEAN_TOKENS.

    0 where max_tokens is not above it: then everyone is taken to run to the limit.
    """
    if max_tokens <= PRIOR_MEAN_TOKENS:
        return 0.0
    low, high = 0.0, 1.0 / PRIOR_MEAN_TOKENS
    for _ in range(60):
        middle = (low + high) / 2
        if (1.0 - (1.0 - middle) ** max_tokens) / middle > PRIOR_MEAN_TOKENS:
            low = middle
        else:
            high = middle
    return (low + high) / 2
