"""Whom to take off: the running sequence that frees most for what it costs."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from nightmill_worker.engine.page_pool import PagePool
from nightmill_worker.engine.running_table import ORDER_BITS, Rows, RunningTable

Tokens = NDArray[np.int64]

MAX_PREEMPTIONS = 3
"""After so many a sequence is pinned."""
_OVERHEAD_TOKENS = 64
"""What taking a sequence off and admitting it again costs besides its KV, in tokens computed."""


class VictimChooser:
    """Picks from the lowest tier the one that frees most for its cost.

    Worth is (pages freed · tokens it is expected to hold them) / tokens lost. Pages with another holder free nothing,
    and more than what is wanted and a page for each running sequence is of no use soon.
    Protected are: one about to finish, one that has just come back, and one that was taken off three times. The
    protected are taken only when the pool has run out and their tier, the lowest that runs, has nobody else; then the
    latest goes, so that the earliest always advances.

    Args:
        table: Running sequences.
        pool: For refcounts.
        expected_remaining: Tokens that rows are expected to draw yet; by default, what max_tokens leaves.
    """

    def __init__(
        self, table: RunningTable, pool: PagePool, expected_remaining: Callable[[Rows], Tokens] | None = None
    ) -> None:
        self._table = table
        self._pool = pool
        self._expected_remaining = expected_remaining or self._longest_remaining

    def for_memory(self, num_wanted: int = 1, *, is_urgent: bool = True) -> int | None:
        """The row to take when pages run out; None when only one sequence runs.

        Args:
            num_wanted: Pages that are missing.
            is_urgent: They have run out; else they are about to, and no protected row is taken.
        """
        table = self._table
        rows = table.rows()
        rows = rows[~table.is_padding[rows]]
        if len(rows) < 2:
            return None
        rank = table.order[rows] >> ORDER_BITS
        rows = rows[rank == rank.max()]
        free = rows[~self._is_protected(rows)]
        if len(free):
            return self._best(free, num_wanted)
        return int(rows[np.argmax(table.order[rows])]) if is_urgent else None

    def for_tier(self, ranks: list[int], num_wanted: int = 1) -> int | None:
        """The row that gives way to a more urgent one; `ranks`: tiers that may be asked, the first to give first."""
        rows = self._unprotected()
        for rank in ranks:
            concerned = rows[self._table.order[rows] >> ORDER_BITS == rank]
            if len(concerned):
                return self._best(concerned, num_wanted)
        return None

    def num_freeable(self, ranks: list[int]) -> int:
        """Pages that the unprotected rows of these tiers would free, all together."""
        rows = self._unprotected()
        return self.num_own_pages(rows[np.isin(self._table.order[rows] >> ORDER_BITS, ranks)])

    def num_own_pages(self, rows: Rows) -> int:
        """Pages that come free when these rows leave; those that several of them share are left out."""
        return int(self._num_own_pages(rows).sum())

    def _unprotected(self) -> Rows:
        rows = self._table.rows()
        return rows[~self._is_protected(rows) & ~self._table.is_padding[rows]]

    def _is_protected(self, rows: Rows) -> NDArray[np.bool_]:
        table = self._table
        about_to_finish = self._longest_remaining(rows) <= table.page_size
        is_immune = table.num_tokens[rows] < table.immune_until[rows]
        protected: NDArray[np.bool_] = about_to_finish | is_immune | (table.num_preemptions[rows] >= MAX_PREEMPTIONS)
        return protected

    def _best(self, rows: Rows, num_wanted: int) -> int:
        useful = np.minimum(self._num_own_pages(rows), num_wanted + self._table.num_used)
        held = useful * self._expected_remaining(rows)
        worth = held / (self._num_lost_tokens(rows) + _OVERHEAD_TOKENS)
        # Of equals the latest: it has the least claim.
        return int(rows[np.lexsort((self._table.order[rows], worth))[-1]])

    def _num_own_pages(self, rows: Rows) -> Tokens:
        width = int(self._table.num_pages[rows].max(initial=0))
        counts: Tokens = np.count_nonzero(self._pool.refcount[self._table.page_table[rows, :width]] == 1, axis=1)
        return counts

    def _num_lost_tokens(self, rows: Rows) -> Tokens:
        """Computed tokens in pages of their own, roughly: those allocated and not yet computed cost nothing."""
        table = self._table
        shared = table.num_pages[rows] - self._num_own_pages(rows)
        return np.maximum(table.num_computed[rows] - shared * table.page_size, 0)

    def _longest_remaining(self, rows: Rows) -> Tokens:
        remaining: Tokens = self._table.max_total[rows] - self._table.num_tokens[rows]
        return remaining
