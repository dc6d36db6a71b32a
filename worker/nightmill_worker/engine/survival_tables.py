"""The survival tables of all distributions end to end, so that rows of many jobs are looked up in one go."""

from collections.abc import Sequence

import numpy as np

from nightmill_worker.engine.length_model import Floats, Ints, LengthDistribution


class SurvivalTables:
    """Looks rows of several distributions up. Copies their tables when one of them has changed."""

    def __init__(self, distributions: Sequence[LengthDistribution]) -> None:
        """`distributions`: the list may grow, and its entries may be replaced."""
        self._distributions = distributions
        self._versions: list[int] = []
        self._survival = np.zeros(0)
        self._starts: Ints = np.zeros(0, np.int64)  # of each one's table
        self._ends: Ints = np.zeros(0, np.int64)  # its max_tokens

    def alive_after(self, index: Ints, generated: Ints, steps: Ints, limits: Ints) -> Floats:
        """LengthDistribution.alive_after for rows of different distributions.

        Args:
            index: [N] into the distributions.
            generated: [N].
            steps: [P].
            limits: [N].
        """
        self._refresh()
        start, end = self._starts[index], self._ends[index]
        position = generated[:, None] + steps
        alive: Floats = self._survival.take(np.minimum(position, end[:, None]) + start[:, None])
        alive /= np.maximum(self._survival[start + np.minimum(generated, end)], 1e-12)[:, None]
        alive *= position < np.minimum(limits, end)[:, None]
        return alive

    def alive_at(self, index: int, generated: int, step: int, limit: int) -> float:
        """The same for one row and one step: the same bits, without arrays."""
        self._refresh()
        start, end = int(self._starts[index]), int(self._ends[index])
        position = generated + step
        if position >= min(limit, end):
            return 0.0
        item = self._survival.item
        return float(item(start + position) / max(item(start + min(generated, end)), 1e-12))

    def _refresh(self) -> None:
        versions = [distribution.version for distribution in self._distributions]
        if versions == self._versions:
            return
        self._versions = versions
        lengths = np.array([len(distribution.survival) for distribution in self._distributions])
        self._starts = np.cumsum(lengths) - lengths
        self._ends = lengths - 1
        self._survival = np.concatenate([distribution.survival for distribution in self._distributions])
