"""The pool of KV pages: who holds each, and which are free. It obeys; it decides nothing."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from nightmill.errors import EngineError
from nightmill_worker.engine.step import NULL_PAGE, PoolShape

Pages = NDArray[np.int32]


class PagePool:
    """Fixed pages, each in exactly one of these places.

        free ──allocate──▶ active ──unpin──▶ free        (not published)
                             │  ▲
                       unpin │  │ pin
                             ▼  │
                            cached ──drop──▶ free        (published: findable through the prefix index)
        active ──retire──▶ in flight ──land──▶ free      (still read or written by something not yet complete)

    Page 0 is the null page and is in none of them.
    """

    def __init__(self, shape: PoolShape) -> None:
        if shape.num_pages < 2:
            raise EngineError(f"the page pool has {shape.num_pages} pages; it needs the null page and one more")
        self.page_size = shape.page_size
        self.num_usable = shape.num_pages - 1
        self.refcount = np.zeros(shape.num_pages, np.int32)  # page tables that hold the page
        self.published = np.zeros(shape.num_pages, np.bool_)  # the prefix index maps a node to it
        self.num_cached = 0
        self.num_in_flight = 0
        self.on_free: Callable[[Pages], None] | None = None  # drills poison what nobody may read any more
        # A stack: the page freed last is the warmest. Page 1 is on top at the start.
        self._free = np.arange(shape.num_pages - 1, NULL_PAGE, -1, dtype=np.int32)
        self._num_free = self.num_usable

    @property
    def num_free(self) -> int:
        """Pages that can be allocated without evicting anything."""
        return self._num_free

    @property
    def num_active(self) -> int:
        """Pages that at least one page table holds."""
        return self.num_usable - self._num_free - self.num_cached - self.num_in_flight

    def free_pages(self) -> Pages:
        """The free pages, in no order; a copy."""
        return self._free[: self._num_free].copy()

    def num_pages(self, num_tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> Pages:
        """Take free pages, each with one holder. The caller has made sure that there are enough."""
        if count > self._num_free:
            raise EngineError(f"page pool: {count} pages wanted, {self._num_free} are free")
        self._num_free -= count
        pages = self._free[self._num_free : self._num_free + count].copy()
        self.refcount[pages] = 1
        return pages

    def pin(self, pages: Pages) -> None:
        """Add a holder to pages that are active or cached; no page twice."""
        self.num_cached -= int(np.count_nonzero(self.refcount[pages] == 0))
        self.refcount[pages] += 1

    def unpin(self, pages: Pages) -> None:
        """Take a holder away; no page twice. Those without any become cached, or free when not published."""
        self.refcount[pages] -= 1
        idle = pages[self.refcount[pages] == 0]
        kept = self.published[idle]
        self.num_cached += int(np.count_nonzero(kept))
        self._give(idle[~kept])

    def publish(self, page: int) -> None:
        """Note that the prefix index maps to this active page from now on; nobody writes to it any more."""
        self.published[page] = True

    def drop(self, page: int) -> None:
        """Note that the prefix index has forgotten the page: a cached one becomes free."""
        self.published[page] = False
        if self.refcount[page] == 0:
            self.num_cached -= 1
            self._give(np.array([page], np.int32))

    def drop_cached(self, pages: Pages) -> None:
        """The same for many, all of them cached."""
        self.published[pages] = False
        self.num_cached -= len(pages)
        self._give(pages)

    def retire(self, pages: Pages) -> None:
        """Take the only holder of unpublished pages away while a copy or a step still uses them."""
        self.refcount[pages] -= 1
        self.num_in_flight += len(pages)

    def land(self, pages: Pages) -> None:
        """What used the retired pages has completed: they are free."""
        self.num_in_flight -= len(pages)
        self._give(pages)

    def _give(self, pages: Pages) -> None:
        self._free[self._num_free : self._num_free + len(pages)] = pages
        self._num_free += len(pages)
        if self.on_free is not None:
            self.on_free(pages)
