"""Swap: the KV of a preempted sequence goes to the host and comes back bit for bit."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from nightmill_worker.engine.host_pool import HostPages, HostPool
from nightmill_worker.engine.page_pool import PagePool
from nightmill_worker.engine.running_table import RunningTable
from nightmill_worker.engine.sequence import Sequence
from nightmill_worker.engine.step import Swaps


@dataclass(frozen=True, slots=True)
class SavedPages:
    """What the host holds of a swapped sequence: pages `first` … of its page table. Those before it were shared."""

    first: int
    host_pages: HostPages
    num_computed: int  # tokens computed when it was taken off; the last page may be partly filled


@dataclass(frozen=True, slots=True)
class OwnPages:
    """What a swap of a running sequence would copy: its pages that nobody else holds."""

    first: int  # index in the page table; the shared ones before it stay where they are, without this holder
    end: int
    num_computed: int

    @property
    def num_pages(self) -> int:
        """Pages to copy."""
        return self.end - self.first


class Swap:
    """Copies pages out before they are given back, and in after a row has got new ones.

        running  [ shared | own ]      save     shared pages lose a holder, own ones are copied and given back
        swapped  tokens · host pages            no page of the pool is pinned
        running  [ matched |hole| own ] restore the prefix index is asked again; own pages the index has lost come from
                                                the host; if shared ones were lost, the hole before them is computed

    Args:
        device: Copies.
        host: Host pages; `device` has as many.
        table: Where page tables are.
        pool: For refcounts.
    """

    def __init__(self, device: Swaps, host: HostPool, table: RunningTable, pool: PagePool) -> None:
        self.host = host
        self._device = device
        self._table = table
        self._pool = pool
        self._saved: dict[Sequence, SavedPages] = {}

    @property
    def num_swapped(self) -> int:
        """Sequences whose KV is on the host."""
        return len(self._saved)

    def saved(self, sequence: Sequence) -> SavedPages | None:
        """What the host holds of a sequence."""
        return self._saved.get(sequence)

    def all_saved(self) -> Mapping[Sequence, SavedPages]:
        """What the host holds of every sequence; for audits."""
        return self._saved

    def own_pages(self, row: int) -> OwnPages:
        """What a swap of this row would copy."""
        table, size = self._table, self._pool.page_size
        if table.hole_end[row]:  # what is before the hole's end is not worth keeping: it was lost once already
            num_computed = int(table.hole_to[row])
            return OwnPages(int(table.hole_end[row]) // size, -(-num_computed // size), num_computed)
        num_computed = int(table.num_computed[row])
        end = -(-num_computed // size)
        # Who holds a page of a prefix holds those before it, so the shared ones come first.
        num_shared = int(np.count_nonzero(self._pool.refcount[table.page_table[row, :end]] > 1))
        return OwnPages(num_shared, end, num_computed)

    def save(self, sequence: Sequence) -> bool:
        """Copy a running sequence's own pages to the host; the caller gives all its pages back next.

        Returns:
            False when there is nothing to copy or the host pool is full: nothing has happened.
        """
        row = sequence.row
        own = self.own_pages(row)
        if not 0 < own.num_pages <= self.host.num_free:
            return False
        host_pages = self.host.allocate(own.num_pages)
        self._device.swap_out(self._table.page_table[row, own.first : own.end].copy(), host_pages)
        self._saved[sequence] = SavedPages(own.first, host_pages, own.num_computed)
        return True

    def restore(self, sequence: Sequence) -> None:
        """Fill the pages of a row that has just got them; nothing to do when the host has nothing of it."""
        saved = self._saved.pop(sequence, None)
        if saved is None:
            return
        table, row, size = self._table, sequence.row, self._pool.page_size
        num_matched = int(table.num_computed[row]) // size
        first = max(num_matched, saved.first)
        end = saved.first + len(saved.host_pages)
        if first < end:
            pages = table.page_table[row, first:end].copy()
            self._device.swap_in(saved.host_pages[first - saved.first :], pages)
        if num_matched < saved.first:
            table.hole_end[row], table.hole_to[row] = saved.first * size, saved.num_computed
        else:
            table.num_computed[row] = max(num_matched * size, saved.num_computed)
        self.host.free(saved.host_pages)

    def drop(self, sequence: Sequence) -> None:
        """A sequence has ended, or is to be recomputed: forget what the host holds of it."""
        saved = self._saved.pop(sequence, None)
        if saved is not None:
            self.host.free(saved.host_pages)
