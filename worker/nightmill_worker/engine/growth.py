"""The admission gate: will the pages hold everything that runs, at every moment until it ends?

U(k) is the number of pages held k steps from now: each sequence weighted with the chance that it still runs then. A
candidate is admitted when max over k of U(k) + z·sqrt(Var(k)) fits. With known lengths the chances are 0 or 1, U(k)
is exact and its maxima lie at the ends of sequences; with unknown ones they come from the length model's survival.

Step k counts from the coming step, 0. A sequence of n tokens (prompt and generated) whose last token is not computed
yet holds pages for n + k tokens in step k, as long as k < what it has still to generate.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from nightmill.states import Tier
from nightmill_worker.engine.length_model import LengthDistribution

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]

DEFAULT_RESERVE = 0.04


@dataclass(frozen=True, slots=True, kw_only=True)
class Holders:
    """Sequences that hold pages, or would: one array element each.

    `own_tokens` leaves out the tokens in pages that are shared (more than one holder); those are counted once, apart.
    """

    own_tokens: Ints  # [N] prompt and generated tokens outside shared pages, ≥ 0
    generated: Ints  # [N] tokens drawn so far
    limits: Ints  # [N] max_tokens
    is_known: Bools  # [N] it will run exactly to its limit
    distribution: Ints  # [N] index into the gate call's distributions; anything where is_known

    def __len__(self) -> int:
        return len(self.own_tokens)


class Margin:
    """z: how many standard deviations of the predicted peak stay free. Learns from preemptions."""

    __slots__ = ("_decay", "_floor", "z")

    START = 1.5
    STEP = 0.25
    FLOOR = 0.5
    CEILING = 8.0

    def __init__(self, half_life_steps: int = 8192) -> None:
        self.z = self.START
        self._floor = self.FLOOR
        self._decay = 0.5 ** (1.0 / half_life_steps)

    def on_step(self) -> None:
        """Decay slowly: half the way to the floor in a half-life."""
        self.z = self._floor + (self.z - self._floor) * self._decay

    def on_memory_preemption(self) -> None:
        """The prediction was too bold."""
        self.z = min(self.z + self.STEP, self.CEILING)


def reserve_pages(tier: Tier, num_pages: int, fraction: float = DEFAULT_RESERVE) -> int:
    """Pages of the pool that `tier` must leave to higher tiers: never lent, so that an urgent row starts at once."""
    return 0 if tier is Tier.HIGH else int(num_pages * fraction)


class GrowthGate:
    """Evaluates one round of admissions. Cheap enough for every step: a few vector operations over what runs."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size

    def admit(
        self,
        running: Holders,
        candidates: Holders,
        distributions: Sequence[LengthDistribution],
        *,
        shared_pages: int,
        slack_pages: int,
        limits: Ints,
        z: float,
        max_admitted: int,
    ) -> list[int]:
        """Indices of the candidates to admit, in order: each that fits together with those admitted before it.

        Args:
            running: what holds pages already.
            candidates: in the order in which they should be admitted.
            distributions: what the holders' `distribution` points to.
            shared_pages: pages with more than one holder, counted for as long as anything runs.
            slack_pages: pages to add throughout: sequences in prefill may run a page behind the prediction.
            limits: [candidates] pages that candidate and everything else may take at most.
            z: see Margin.
            max_admitted: free slots.
        """
        points = self._points(running, candidates)
        used, variance = self._usage(running, distributions, points)
        used += shared_pages + slack_pages
        pages, spread = self._pages(candidates, distributions, points)
        admitted: list[int] = []
        for index in range(len(candidates)):
            if len(admitted) == max_admitted:
                break
            trial, doubt = used + pages[index], variance + spread[index]
            if np.max(trial + z * np.sqrt(doubt)) <= limits[index]:
                used, variance = trial, doubt
                admitted.append(index)
        return admitted

    def peak(
        self, running: Holders, distributions: Sequence[LengthDistribution], *, shared_pages: int, z: float
    ) -> float:
        """The predicted most pages ever held if nothing more is admitted."""
        points = self._points(running, running)
        used, variance = self._usage(running, distributions, points)
        return float(np.max(used + z * np.sqrt(variance), initial=0.0)) + shared_pages

    def _points(self, running: Holders, candidates: Holders) -> Ints:
        """The steps at which a maximum can lie: the last one of each known sequence, and a grid for the unknown."""
        last = [
            holders.limits[holders.is_known] - holders.generated[holders.is_known] - 1
            for holders in (running, candidates)
        ]
        points = np.concatenate([*last, np.zeros(1, np.int64)])
        if not (running.is_known.all() and candidates.is_known.all()):
            longest = max(int(np.max(h.limits - h.generated, initial=1)) for h in (running, candidates))
            points = np.concatenate([points, _grid(longest)])
        return np.unique(np.maximum(points, 0))

    def _usage(
        self, holders: Holders, distributions: Sequence[LengthDistribution], points: Ints
    ) -> tuple[Floats, Floats]:
        """Expected pages and variance at each point, summed over the holders."""
        known = holders.is_known
        used = self._known_usage(holders.own_tokens[known], (holders.limits - holders.generated)[known], points)
        variance = np.zeros(len(points))
        if not known.all():
            pages, spread = self._pages(_select(holders, ~known), distributions, points)
            used += pages.sum(axis=0)
            variance += spread.sum(axis=0)
        return used, variance

    def _known_usage(self, own: Ints, remaining: Ints, points: Ints) -> Floats:
        """Σ ceil((own + k) / page) over those with remaining > k, exact, in O(holders · page + points).

        With own = a·page + r and k = q·page + s, ceil((own + k) / page) = a + q + (r + s > 0) + (r + s > page):
        residues counted above each value, by rank of `remaining`, answer every point with a look-up.
        """
        size = self._page_size
        order = np.argsort(remaining, kind="stable")
        own, remaining = own[order], remaining[order]
        whole, residue = np.divmod(own, size)
        alive_from = np.searchsorted(remaining, points, side="right")  # first rank that still runs at the point
        whole_after = _suffix(whole)[alive_from]
        above = _suffix((residue[:, None] > np.arange(size + 1)[None, :]).astype(np.int64))  # [rank, x]: r > x
        count = len(own) - alive_from
        turns, offset = np.divmod(points, size)
        started = np.where(offset > 0, count, above[alive_from, 0])
        wrapped = above[alive_from, size - offset]
        used: Floats = (whole_after + count * turns + started + wrapped).astype(np.float64)
        return used

    def _pages(
        self, holders: Holders, distributions: Sequence[LengthDistribution], points: Ints
    ) -> tuple[Floats, Floats]:
        """Expected pages and their variance for each holder and point, [holders, points]."""
        alive = ((holders.limits - holders.generated)[:, None] > points[None, :]).astype(np.float64)
        for index, distribution in enumerate(distributions):
            rows = np.flatnonzero(~holders.is_known & (holders.distribution == index))
            if len(rows):
                alive[rows] = distribution.alive_after(holders.generated[rows], points, holders.limits[rows])
        pages = (holders.own_tokens[:, None] + points[None, :] + (self._page_size - 1)) // self._page_size
        expected = alive * pages
        # A sequence holds `pages` with chance `alive` and nothing otherwise.
        return expected, expected * (pages - expected)


def _grid(longest: int) -> Ints:
    """0, 1, 2, … first by ones, then by about a quarter more each: survival is smooth, a grid finds its maximum."""
    points = [0]
    while points[-1] < longest - 1:
        points.append(points[-1] + max(1, points[-1] // 4))
    return np.array(points, np.int64)


def _suffix(values: Ints) -> Ints:
    """Sums from each rank to the end along axis 0, with a row of zeros behind the last."""
    sums = np.zeros((len(values) + 1, *values.shape[1:]), np.int64)
    sums[:-1] = np.cumsum(values[::-1], axis=0)[::-1]
    return sums


def _select(holders: Holders, rows: Bools) -> Holders:
    return Holders(
        own_tokens=holders.own_tokens[rows],
        generated=holders.generated[rows],
        limits=holders.limits[rows],
        is_known=holders.is_known[rows],
        distribution=holders.distribution[rows],
    )
