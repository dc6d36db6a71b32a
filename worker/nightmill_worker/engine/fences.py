"""Pages that a step in flight still reads or writes although whoever held them has let go: the step holds them."""

from dataclasses import dataclass

import numpy as np

from nightmill_worker.engine.page_pool import PagePool, Pages
from nightmill_worker.engine.prefix_index import Node, PrefixIndex


@dataclass(frozen=True, slots=True)
class _Fence:
    step: int
    own: Pages  # nobody else's: in flight, and free when the step has ended
    shared: Pages  # published, or others': a holder more until then
    last: Node | None  # the last published one of a prefix chain


class Fences:
    """Steps end in the order of their numbers, and a page is fenced by the last step that has it."""

    def __init__(self, pool: PagePool, index: PrefixIndex | None) -> None:
        self._pool = pool
        self._index = index
        self._fences: list[_Fence] = []
        self._landed = -1  # the last step that has ended

    def is_in_flight(self, step: int) -> bool:
        """A step with this number, if there is one, has not ended yet."""
        return step > self._landed

    def hold(self, step: int, pages: Pages, last: Node | None = None) -> None:
        """Take over what a holder of pages lets go, until a step in flight has ended.

        Args:
            step: In flight.
            pages: The holder's; no page twice.
            last: Of the pages, the last that is published: it is touched when it comes free.
        """
        is_own = (self._pool.refcount[pages] == 1) & ~self._pool.published[pages]
        own = pages[is_own]
        self._pool.retire(own)
        self._fences.append(_Fence(step, own, pages[~is_own], last))

    def land(self, step: int) -> None:
        """A step has ended, and so have all before it."""
        self._landed = step
        # Not in the order of the steps: a row that is not in the newest one is fenced by the one before.
        held, self._fences = self._fences, []
        for fence in held:
            if fence.step > step:
                self._fences.append(fence)
                continue
            self._pool.land(fence.own)
            self._pool.unpin(fence.shared)
            if self._index is not None and fence.last is not None:
                self._index.touch(fence.last)

    def shared_pages(self) -> Pages:
        """Pages with a fence for a holder, each as often; for audits."""
        return np.concatenate([np.empty(0, np.int32), *(fence.shared for fence in self._fences)])

    def own_pages(self) -> Pages:
        """Pages that are in flight; for audits."""
        return np.concatenate([np.empty(0, np.int32), *(fence.own for fence in self._fences)])
