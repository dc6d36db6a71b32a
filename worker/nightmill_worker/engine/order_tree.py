"""The prefix tree of the requests that wait: who shares which leading pages, and what each subtree still asks for.

Paths are the prefix index's interned node uids, one for each full page of the prompt. A uid stands for its page *and*
everything before it, so two paths that agree at position i agree everywhere before i. Only branching points become
nodes: a request that shares nothing costs one entry, whatever its length.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum


class Pick(IntEnum):
    """Which child of a node goes first."""

    LONGEST = 0
    """The longest expected decode: nothing long may be left for the tail."""
    COMPUTE = 1
    """The oldest with more prompt tokens for each expected decode token than the mix had when it came."""
    MEMORY = 2
    """The oldest with fewer."""


@dataclass(slots=True, eq=False)
class Waiting:
    """A request that waits, as the planner sees it."""

    key: int
    job_id: str
    path: tuple[int, ...]  # interned uids of the prompt's full pages, root first
    prompt_tokens: int
    expected_tokens: int  # predicted decode length, ≥ 1
    arrival: int  # unique, in order of arrival; ties go to the earlier
    issued_at_arrival: int = 0  # requests its queue had issued when it came

    @property
    def depth(self) -> int:
        """Full pages of the prompt."""
        return len(self.path)


_OTHER_SIDE = {Pick.LONGEST: Pick.LONGEST, Pick.COMPUTE: Pick.MEMORY, Pick.MEMORY: Pick.COMPUTE}
_Entry = tuple[float, int, int, "Waiting | Node"]


@dataclass(slots=True, eq=False)
class Node:
    """A run of pages that at least two requests had in common when it was made."""

    path: tuple[int, ...]  # of any request below; the first `depth` entries are this node's
    depth: int
    arrival: int
    children: dict[int, "Waiting | Node"] = field(default_factory=dict)
    count: int = 0
    prompt_tokens: int = 0  # sums over the requests below
    expected_tokens: int = 0
    serial: int = 0  # of the newest entry in the parent's heaps; older ones are void
    heaps: tuple[list[_Entry], list[_Entry], list[_Entry]] = field(default_factory=lambda: ([], [], []))

    def push(self, child: "Waiting | Node", serial: int, mix: float) -> None:
        """Enter or renew a child; its earlier entries become void. `mix`: prompt tokens per expected decode token."""
        if isinstance(child, Node):
            child.serial = serial
            longest = child.longest
        else:
            longest = child.expected_tokens
        # Each side is a line, not a ranking: by density, what lies in the middle would wait for ever.
        side = Pick.COMPUTE if child.prompt_tokens >= mix * child.expected_tokens else Pick.MEMORY
        for rule, value in ((Pick.LONGEST, -longest), (side, child.arrival)):
            heap = self.heaps[rule]
            heapq.heappush(heap, (value, child.arrival, serial, child))
            if len(heap) > 64 + 4 * len(self.children):
                heap[:] = [entry for entry in heap if self._is_live(entry)]
                heapq.heapify(heap)

    def pick(self, rule: Pick) -> "Waiting | Node":
        """The child that goes first by `rule`, of the other side where that has none; the node must not be empty."""
        child = self._first(rule) or self._first(_OTHER_SIDE[rule])
        if child is None:
            raise ValueError("nobody waits below this node")
        return child

    def _first(self, rule: Pick) -> "Waiting | Node | None":
        heap = self.heaps[rule]
        while heap and not self._is_live(heap[0]):
            heapq.heappop(heap)
        return heap[0][3] if heap else None

    @property
    def longest(self) -> int:
        """Longest expected decode below; 0 when empty."""
        if not self.children:
            return 0
        child = self.pick(Pick.LONGEST)
        return child.longest if isinstance(child, Node) else child.expected_tokens

    def count_in(self, request: Waiting, sign: int) -> None:
        """Add (+1) or take away (-1) one request below."""
        self.count += sign
        self.prompt_tokens += sign * request.prompt_tokens
        self.expected_tokens += sign * request.expected_tokens

    def _is_live(self, entry: _Entry) -> bool:
        child = entry[3]
        if isinstance(child, Node):
            return child.serial == entry[2] and self.children.get(child.path[self.depth]) is child
        return self.children.get(_edge(child, self.depth)) is child


class OrderTree:
    """Requests by their prefix path. Every operation is O(branching points on the path · log n)."""

    def __init__(self) -> None:
        self.root = Node(path=(), depth=0, arrival=-1)
        self.mix = 1.0  # prompt tokens per expected decode token; who inserts keeps it up to date
        self._serial = 0

    def __len__(self) -> int:
        return self.root.count

    def insert(self, request: Waiting) -> None:
        """Add a request; its key must not be in the tree."""
        trail = [self.root]
        while True:
            node = trail[-1]
            edge = _edge(request, node.depth)
            child = node.children.get(edge)
            if child is None:
                node.children[edge] = request
                break
            shared = _common(child.path, request.path, node.depth, child.depth)
            trail.append(
                child if isinstance(child, Node) and shared == child.depth else self._split(node, child, shared)
            )
        for node in trail:
            node.count_in(request, +1)
        self._push(trail[-1], request)
        self._renew(trail)

    def remove(self, request: Waiting) -> None:
        """Take a request out; it must be in the tree."""
        trail = [self.root]
        while (child := trail[-1].children[_edge(request, trail[-1].depth)]) is not request:
            assert isinstance(child, Node)
            trail.append(child)
        del trail[-1].children[_edge(request, trail[-1].depth)]
        for node in trail:
            node.count_in(request, -1)
        while len(trail) > 1 and not trail[-1].children:
            gone = trail.pop()
            del trail[-1].children[gone.path[trail[-1].depth]]
        self._renew(trail)

    def nearest(self, path: tuple[int, ...]) -> Node | Waiting:
        """What waits and shares the most leading pages with `path`: the root when nothing does."""
        node = self.root
        while node.depth < len(path):
            child = node.children.get(path[node.depth])
            if child is None:
                break
            if not isinstance(child, Node) or _common(child.path, path, node.depth, child.depth) < child.depth:
                return child
            node = child
        return node

    def first(self, start: Node | Waiting, rule: Pick) -> Waiting:
        """The request that goes first below `start`."""
        while isinstance(start, Node):
            start = start.pick(rule)
        return start

    def __iter__(self) -> Iterator[Waiting]:
        stack: list[Node | Waiting] = [self.root]
        while stack:
            item = stack.pop()
            if isinstance(item, Node):
                stack.extend(item.children.values())
            else:
                yield item

    def _split(self, node: Node, child: Waiting | Node, depth: int) -> Node:
        """Put a node at `depth` between `node` and `child`."""
        middle = Node(path=child.path, depth=depth, arrival=child.arrival)
        node.children[child.path[node.depth]] = middle
        edge = child.path[depth] if isinstance(child, Node) else _edge(child, depth)
        middle.children[edge] = child
        middle.count = child.count if isinstance(child, Node) else 1
        middle.prompt_tokens, middle.expected_tokens = child.prompt_tokens, child.expected_tokens
        self._push(middle, child)
        return middle

    def _renew(self, trail: list[Node]) -> None:
        for parent, child in zip(reversed(trail[:-1]), reversed(trail[1:]), strict=True):
            self._push(parent, child)

    def _push(self, node: Node, child: Waiting | Node) -> None:
        self._serial += 1
        node.push(child, self._serial, self.mix)


def _edge(request: Waiting, depth: int) -> int:
    """The key of a request's branch at a node: its next page, or a key of its own where its full pages end."""
    return request.path[depth] if depth < len(request.path) else -1 - request.arrival


def _common(a: tuple[int, ...], b: tuple[int, ...], low: int, high: int) -> int:
    """Leading entries that a and b share: at least `low`, at most `high`. Bisects, as agreement has no gaps."""
    high = min(high, len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[middle - 1] == b[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
