"""The admission gate's arithmetic: will the pages hold everything that runs, at every moment until it ends?

U(k) is the number of pages held k steps from now: each sequence weighted with the chance that it still runs then. A
candidate fits when max over k of U(k) + z·sqrt(Var(k)) does. With known lengths the chances are 0 or 1, U(k) is exact
and its maxima lie at the ends of sequences; with unknown ones they come from the length model's survival.

Step k counts from the coming step, 0. A sequence of n tokens (prompt and generated) whose last token is not computed
yet holds pages for n + k tokens in step k, as long as k < what it has still to generate.
"""

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from nightmill.states import Tier
from nightmill.tier_weights import TierWeights
from nightmill_worker.engine.survival_tables import SurvivalTables

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]

DEFAULT_RESERVE = 0.04
FOREVER = 1 << 40
"""More steps than any sequence has."""
_LOWEST = max(Tier, key=lambda tier: tier.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holders:
    """Sequences that hold pages: one array element each.

    `own_tokens` leaves out the tokens in pages that are shared (more than one holder); those are counted once, apart.
    """

    own_tokens: Ints  # [N] prompt and generated tokens outside shared pages, ≥ 0
    generated: Ints  # [N] tokens drawn so far
    limits: Ints  # [N] max_tokens
    is_known: Bools  # [N] it will run exactly to its limit
    distribution: Ints  # [N] index into the round's distributions; anything where is_known

    def select(self, rows: Bools) -> "Holders":
        """Some of them."""
        return Holders(
            own_tokens=self.own_tokens[rows],
            generated=self.generated[rows],
            limits=self.limits[rows],
            is_known=self.is_known[rows],
            distribution=self.distribution[rows],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A sequence that would hold pages; the fields are Holders', for one.

    Prefix pages that one running sequence holds alone are not its own as long as that lender runs.
    """

    own_tokens: int
    generated: int
    limit: int
    is_known: bool
    distribution: int
    lent_pages: int = 0
    lender_ends: int = FOREVER  # steps until the lender lets go of them

    @property
    def remaining(self) -> int:
        """Tokens it may still generate."""
        return self.limit - self.generated


class Margin:
    """z: how many standard deviations of the predicted peak stay free. Learns from preemptions."""

    __slots__ = ("_decay", "z")

    START = 1.5
    STEP = 0.25
    FLOOR = 1.0
    CEILING = 8.0

    def __init__(self, half_life_steps: int = 8192) -> None:
        self.z = self.START
        self._decay = 0.5 ** (1.0 / half_life_steps)

    def on_step(self) -> None:
        """Decay slowly: half the way to the floor in a half-life."""
        self.z = self.FLOOR + (self.z - self.FLOOR) * self._decay

    def on_memory_preemption(self) -> None:
        """The prediction was too bold."""
        self.z = min(self.z + self.STEP, self.CEILING)


def reserve_pages(tier: Tier, num_pages: int, fraction: float, weights: TierWeights) -> int:
    """Pages of the pool that `tier` must leave to higher ones: never lent, so that an urgent row starts at once.

    The lowest tier leaves `fraction` of the pool; the others own parts of that by their shares.
    """
    owners = [owner for owner in Tier if owner is not _LOWEST]
    total = sum(weights.fraction(owner) for owner in owners)
    if tier is _LOWEST or total == 0:
        return int(num_pages * fraction) if tier is not Tier.HIGH else 0
    above = sum(weights.fraction(owner) for owner in owners if owner.rank < tier.rank)
    return int(num_pages * fraction * above / total)


class GrowthRound:
    """One step's admissions: what runs is summed up once, each candidate then costs a few small vector operations.

    While the pool is full nearly every candidate is refused, at about the same point step after step; so the point of
    the last refusal is looked at first, and the rest only when the candidate fits there.
    """

    def __init__(
        self,
        page_size: int,
        running: Holders,
        survival: SurvivalTables,
        *,
        shared_pages: int,
        z: float,
        grid: Ints,
        hint: int | None = None,
    ) -> None:
        """Take note of what runs.

        Args:
            page_size: Tokens.
            running: What holds pages.
            survival: Of the lengths that are not known.
            shared_pages: With more than one holder, counted for as long as anything runs.
            z: Standard deviations that stay free.
            grid: Of `grid()`.
            hint: `worst` of the round before.
        """
        self._page_size = page_size
        # A division of whole numbers costs more than all the rest.
        self._page_bits = page_size.bit_length() - 1 if page_size & (page_size - 1) == 0 else None
        self._survival = survival
        self._z = z
        self._shared_pages = shared_pages
        known = running.is_known
        self._remaining = running.limits[known] - running.generated[known]
        self._own = running.own_tokens[known]
        self._unknown = running.select(~known)
        self._admitted: list[Candidate] = []
        self._grid = grid
        self.worst: int | None = None
        """The point at which a candidate was refused last."""
        self._points = self._first_points(hint)
        self._is_complete = False
        self._horizon = -1
        if len(self._points):
            self._used, self._variance = self._usage_at_few(self._points)

    def _first_points(self, hint: int | None) -> Ints:
        """The hint, and where it has moved to if it is the end of a known sequence: those that are points."""
        if hint is None:
            return np.empty(0, np.int64)
        return np.array(
            [p for p in (hint - 1, hint) if (self._grid == p).any() or (self._remaining - 1 == p).any()], np.int64
        )

    def _complete(self, horizon: int) -> None:
        """Look at all points where a maximum can lie: the last step of each known sequence, a grid for the unknown.

        From `horizon` on, and after the end of all that runs, nothing is held but what is shared: no maximum there.
        """
        if not self._is_complete:
            self._known = KnownUsage(self._own, self._remaining, self._page_size)
            longest = self._unknown.limits - self._unknown.generated
            horizon = max(horizon, int(longest.max(initial=0)), int(self._remaining.max(initial=0)))
        self._is_complete, self._horizon = True, horizon
        grid = self._grid[: int(np.searchsorted(self._grid, horizon)) + 1]
        ends = [c.remaining - 1 for c in self._admitted if c.is_known]
        self._points = np.unique(np.concatenate((grid, np.maximum(self._remaining - 1, 0), np.array(ends, np.int64))))
        self._used, self._variance = self._usage(self._points)

    @property
    def peak(self) -> float:
        """The predicted most pages ever held if nothing more is admitted."""
        if not self._is_complete:
            self._complete(0)
        return float(np.max(self._used + self._z * np.sqrt(self._variance)))

    def fits(self, candidate: Candidate, limit: int) -> bool:
        """Whether it and everything admitted so far never hold more than `limit` pages."""
        if self._is_refused(candidate, limit):
            return False
        if candidate.remaining > self._horizon:
            self._complete(candidate.remaining)
            if self._is_refused(candidate, limit):
                return False
        if not candidate.is_known:
            return True
        last = np.array([candidate.remaining - 1])
        used, variance = self._usage(last)
        pages, spread = self._pages_of(candidate, last)
        return bool(used[0] + pages[0] + self._z * np.sqrt(variance[0] + spread[0]) <= limit)

    def _is_refused(self, candidate: Candidate, limit: int) -> bool:
        """At one of the points looked at so far."""
        if not self._is_complete:
            return self._is_refused_at_few(candidate, limit)
        pages, spread = self._pages_of(candidate, self._points)
        needed = self._used + pages + self._z * np.sqrt(self._variance + spread)
        worst = int(needed.argmax())
        if needed[worst] <= limit:
            return False
        self.worst = int(self._points[worst])
        return True

    def _is_refused_at_few(self, candidate: Candidate, limit: int) -> bool:
        """Without arrays, which cost more than a point or two."""
        c, worst = candidate, float(limit)
        for i, point in enumerate(self._points.tolist()):
            if c.is_known:
                alive = float(c.remaining > point)
            else:
                alive = self._survival.alive_at(c.distribution, c.generated, point, c.limit)
            pages = (c.own_tokens + point + self._page_size - 1) // self._page_size
            if point >= c.lender_ends:
                pages += c.lent_pages
            expected = alive * pages
            spread = expected * (pages - expected)
            needed = self._used.item(i) + expected + self._z * math.sqrt(self._variance.item(i) + spread)
            if needed > worst:
                worst, self.worst = needed, point
        return worst > limit

    def add(self, candidate: Candidate) -> None:
        """It is admitted."""
        if candidate.is_known:
            last = np.array([candidate.remaining - 1])
            used, variance = self._usage(last)
            self._points = np.append(self._points, last)
            self._used = np.append(self._used, used)
            self._variance = np.append(self._variance, variance)
        pages, spread = self._pages_of(candidate, self._points)
        self._used = self._used + pages
        self._variance = self._variance + spread
        self._admitted.append(candidate)

    def _usage(self, points: Ints) -> tuple[Floats, Floats]:
        """Expected pages and their variance at each point, over all that runs."""
        used = self._known.at(points) + self._shared_pages
        variance = np.zeros(len(points))
        if len(self._unknown.limits):
            pages, spread = self._pages_of_unknown(points)
            used += pages.sum(axis=0)
            variance += spread.sum(axis=0)
        for candidate in self._admitted:
            pages, spread = self._pages_of(candidate, points)
            used += pages
            variance += spread
        return used, variance

    def _usage_at_few(self, points: Ints) -> tuple[Floats, Floats]:
        """`_usage` before anything was admitted, without summing up the known first."""
        runs = self._remaining[:, None] > points
        pages = -(-(self._own[:, None] + points) // self._page_size) * runs
        used = pages.sum(axis=0).astype(np.float64) + self._shared_pages
        variance = np.zeros(len(points))
        if len(self._unknown.limits):
            expected, spread = self._pages_of_unknown(points)
            used += expected.sum(axis=0)
            variance += spread.sum(axis=0)
        return used, variance

    def _pages_of(self, candidate: Candidate, points: Ints) -> tuple[Floats, Floats]:
        alive: NDArray[np.float64]
        if candidate.is_known:
            alive = (candidate.remaining > points).astype(np.float64)
        else:
            fields = (candidate.distribution, candidate.generated, candidate.limit)
            index, generated, limit = np.array(fields, np.int64).reshape(3, 1)
            alive = self._survival.alive_after(index, generated, points, limit)[0]
        pages = (candidate.own_tokens + points + (self._page_size - 1)) // self._page_size
        if candidate.lent_pages:
            pages = pages + candidate.lent_pages * (points >= candidate.lender_ends)
        expected = alive * pages
        return expected, expected * (pages - expected)

    def _pages_of_unknown(self, points: Ints) -> tuple[Floats, Floats]:
        holders = self._unknown
        alive = self._survival.alive_after(holders.distribution, holders.generated, points, holders.limits)
        pages = holders.own_tokens[:, None] + (points + (self._page_size - 1))
        if self._page_bits is None:
            pages //= self._page_size
        else:
            pages >>= self._page_bits
        expected = alive * pages
        # A sequence holds `pages` with chance `alive` and nothing otherwise.
        return expected, expected * (pages - expected)


class KnownUsage:
    """Σ ceil((own + k) / page) over the sequences with remaining > k, exact, for any k by look-up.

    With own = a·page + r and k = q·page + s, ceil((own + k) / page) = a + q + (r + s > 0) + (r + s > page): residues
    counted above each value, by rank of `remaining`, answer every k. O(sequences · page) once, O(1) for each k.
    """

    def __init__(self, own: Ints, remaining: Ints, page_size: int) -> None:
        self._size = page_size
        order = np.argsort(remaining, kind="stable")
        self._remaining = remaining[order]
        whole, residue = np.divmod(own[order], page_size)
        self._whole = _suffix(whole)
        is_above = residue[:, None] > np.arange(page_size + 1)[None, :]
        self._above = _suffix(is_above.astype(np.int64))  # [rank, x]: how many from there on have a residue above x

    def at(self, points: Ints) -> Floats:
        """Pages held at each point."""
        alive_from = np.searchsorted(self._remaining, points, side="right")  # first rank that still runs at the point
        count = len(self._remaining) - alive_from
        turns, offset = np.divmod(points, self._size)
        started = np.where(offset > 0, count, self._above[alive_from, 0])
        wrapped = self._above[alive_from, self._size - offset]
        used: Floats = (self._whole[alive_from] + count * turns + started + wrapped).astype(np.float64)
        return used


def grid(horizon: int) -> Ints:
    """Steps 0, 1, 2, … to `horizon`, first by ones, then by a quarter more each: survival is smooth."""
    points = [0]
    while points[-1] < horizon - 1:
        points.append(points[-1] + max(1, points[-1] // 4))
    return np.array(points, np.int64)


def _suffix(values: Ints) -> Ints:
    """Sums from each rank to the end along axis 0, with a row of zeros behind the last."""
    sums = np.zeros((len(values) + 1, *values.shape[1:]), np.int64)
    sums[:-1] = np.cumsum(values[::-1], axis=0)[::-1]
    return sums
