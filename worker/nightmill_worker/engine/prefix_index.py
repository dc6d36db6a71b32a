"""The prefix index: which page holds the KV of which prefix. Exact keys, full pages only."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from nightmill_worker.engine.page_pool import PagePool
from nightmill_worker.engine.step import NULL_PAGE

if TYPE_CHECKING:
    from nightmill_worker.engine.sequence import Sequence


class Node:
    """One page worth of tokens after one exact prefix; its identity outlives the page's residency.

    Interned: equal prefixes are the same node, so requests that wait can refer to pages that are not there yet.
    """

    __slots__ = (
        "depth",
        "last_used",
        "num_refs",
        "num_resident_children",
        "page",
        "parent",
        "tokens",
        "uid",
        "waiters",
        "wanted",
        "writer",
    )

    def __init__(self, uid: int, parent: Node | None, tokens: tuple[int, ...]) -> None:
        self.uid = uid
        self.parent = parent
        self.tokens = tokens
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.page = NULL_PAGE  # NULL_PAGE: not resident
        self.num_refs = 0  # child nodes + sequences whose chain ends here + 1 when resident
        self.num_resident_children = 0
        self.last_used = 0
        self.wanted = 0  # waiting requests that have this page in their prefix
        self.writer: Sequence | None = None  # the running sequence that is computing this page
        self.waiters: list[Sequence] = []  # parked until the writer has published this page, or left

    def __repr__(self) -> str:
        return f"Node({self.uid}, depth={self.depth}, page={self.page}, refs={self.num_refs})"


EvictionKey = tuple[int, int, int]
Entry = tuple[EvictionKey, int, Node]
"""Eviction key, order of the offer (breaks ties), node."""


class PrefixIndex:
    """A flat dict from (parent's uid, exact tokens of the page) to node: O(1) per page, no collisions, no splits.

    A sequence that holds a node's page holds its parent's page too (`Residency` keeps that true), so every page
    that nobody holds can be evicted, leaf before parent.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._refcount = memoryview(pool.refcount.data)  # single elements are read faster through it
        self._nodes: dict[tuple[int, tuple[int, ...]], Node] = {}
        self._node_of_page: dict[int, Node] = {}
        self._next_uid = 1
        self._clock = 0
        self._evictable: list[Entry] = []  # heap; entries may be stale
        self._num_offers = 0
        self.num_evictions = 0
        self.num_wanted_evictions = 0  # of pages that a waiting request would have used
        self.root = Node(0, None, ())
        self.root.num_refs = 1

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def node_of_page(self) -> dict[int, Node]:
        """Resident pages; for audits."""
        return self._node_of_page

    def intern(self, parent: Node, tokens: tuple[int, ...]) -> Node:
        """The node of this page after this prefix. It lives as long as something refers to it: `acquire` it."""
        key = (parent.uid, tokens)
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = Node(self._next_uid, parent, tokens)
            self._next_uid += 1
            parent.num_refs += 1
        return node

    def extend(self, last: Node | None, tokens: tuple[int, ...]) -> Node:
        """Intern the page after `last` (None: the first one) and move a reference from there to it."""
        node = self.intern(last or self.root, tokens)
        node.num_refs += 1
        if last is not None:
            last.num_refs -= 1  # not its last reference: its child, the node, is one
        return node

    def acquire(self, node: Node) -> None:
        """Refer to a node."""
        node.num_refs += 1

    def release(self, node: Node) -> None:
        """Stop referring to a node; it and its ancestors are forgotten as soon as nothing refers to them."""
        current: Node | None = node
        while current is not None:
            current.num_refs -= 1
            if current.num_refs > 0:
                return
            if current.parent is not None:
                del self._nodes[(current.parent.uid, current.tokens)]
            current = current.parent

    def publish(self, node: Node, page: int) -> None:
        """Map the node to an active, fully computed page."""
        node.page = page
        node.num_refs += 1
        if node.parent is not None:
            node.parent.num_resident_children += 1
        self._node_of_page[page] = node
        self._pool.publish(page)

    def touch(self, node: Node) -> None:
        """A holder of the page at the end of its chain has let go: note the time, and whether it can be evicted.

        Ancestors need no stamp of their own: they inherit their children's when those are evicted.
        """
        self._clock += 1
        node.last_used = self._clock
        self._offer(node)

    def evict(self, count: int) -> None:
        """Free this many cached pages, those first that are wanted last. The caller knows that there are enough."""
        pages: list[int] = []
        while len(pages) < count:
            key, _, node = heapq.heappop(self._evictable)
            # As _is_current, spelled out: dozens of times in a step.
            if not node.page or node.num_resident_children or self._refcount[node.page]:
                continue
            if key != (node.wanted, node.last_used, -node.depth):
                continue
            self.num_wanted_evictions += node.wanted > 0
            pages.append(self._unmap(node))
        self.num_evictions += count
        self._pool.drop_cached(np.array(pages, np.int32))

    def forget(self, node: Node) -> None:
        """Unmap a node without resident children; its page is free unless a sequence holds it."""
        self._pool.drop(self._unmap(node))

    def _unmap(self, node: Node) -> int:
        page, node.page = node.page, NULL_PAGE
        del self._node_of_page[page]
        parent = node.parent
        if parent is not None:
            parent.num_resident_children -= 1
            if parent.last_used < node.last_used:
                parent.last_used = node.last_used
            if not parent.num_resident_children:
                self._offer(parent)
        if node.num_refs > 1:
            node.num_refs -= 1
        else:
            self.release(node)
        return page

    def want(self, nodes: Iterable[Node], change: int) -> None:
        """Count one waiting request more (+1) or less (-1) for each page of a prefix."""
        for node in nodes:
            node.wanted += change
            if node.page:
                self._offer(node)

    def _eviction_key(self, node: Node) -> EvictionKey:
        # Evict by the future: what nobody waits for goes first, then what the fewest wait for.
        return (node.wanted, node.last_used, -node.depth)

    def _is_evictable(self, node: Node) -> bool:
        return node.page != NULL_PAGE and node.num_resident_children == 0 and self._refcount[node.page] == 0

    def _is_current(self, entry: Entry) -> bool:
        return self._is_evictable(entry[2]) and entry[0] == self._eviction_key(entry[2])

    def _offer(self, node: Node) -> None:
        if not self._is_evictable(node):
            return
        if len(self._evictable) > 2 * self._pool.num_usable + 64:
            self._evictable = [entry for entry in self._evictable if self._is_current(entry)]
            heapq.heapify(self._evictable)
        self._num_offers += 1
        heapq.heappush(self._evictable, (self._eviction_key(node), self._num_offers, node))
