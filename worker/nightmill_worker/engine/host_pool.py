"""The pool of host pages that hold the KV of swapped sequences: which are free. It decides nothing."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from nightmill.errors import EngineError

HostPages = NDArray[np.int32]


class HostPool:
    """Host pages 0 … num_pages - 1, each free or held by one swapped sequence; nothing is shared here."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.on_free: Callable[[HostPages], None] | None = None  # drills poison what nobody may read any more
        self._is_used = np.zeros(num_pages, np.bool_)
        # A stack, as in PagePool: what was touched last is used again first, the rest is never paged in.
        self._free = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._num_free = num_pages

    @property
    def num_free(self) -> int:
        """Pages that can be taken."""
        return self._num_free

    @property
    def num_used(self) -> int:
        """Pages that hold something."""
        return self.num_pages - self._num_free

    def used_pages(self) -> HostPages:
        """The pages in use, ascending."""
        return np.flatnonzero(self._is_used).astype(np.int32)

    def allocate(self, count: int) -> HostPages:
        """Take pages, in ascending order where they are neighbours. The caller has made sure that there are enough.

        Raises:
            EngineError: there are not.
        """
        if count > self._num_free:
            raise EngineError(f"host pool: {count} pages wanted, {self._num_free} are free")
        self._num_free -= count
        pages = self._free[self._num_free : self._num_free + count][::-1].copy()
        self._is_used[pages] = True
        return pages

    def free(self, pages: HostPages) -> None:
        """Give pages back.

        Raises:
            EngineError: one of them is free already.
        """
        if not self._is_used[pages].all():
            raise EngineError(f"host pool: of pages {pages.tolist()}, some are free already")
        self._is_used[pages] = False
        self._free[self._num_free : self._num_free + len(pages)] = pages[::-1]
        self._num_free += len(pages)
        if self.on_free is not None:
            self.on_free(pages)
