import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nightmill_worker.engine.order_tree import Node, OrderTree, Pick, Waiting


class Interner:
    """Node uids as the prefix index gives them: one per (prefix, page)."""

    def __init__(self) -> None:
        self._uids: dict[tuple[int, ...], int] = {}

    def path(self, pages: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self._uids.setdefault(pages[: i + 1], len(self._uids) + 1) for i in range(len(pages)))


MIX = 2.5  # prompt tokens per expected decode token: about the middle of REQUESTS
PAGES = st.lists(st.integers(0, 2), max_size=5).map(tuple)
REQUESTS = st.lists(st.tuples(PAGES, st.integers(1, 50), st.integers(1, 20)), min_size=1, max_size=30)


def waiting(specs, interner=None):
    interner = interner or Interner()
    return [Waiting(i, "j", interner.path(pages), p, e, i) for i, (pages, p, e) in enumerate(specs)]


def audit(node: Node) -> tuple[int, int, int, int]:
    """Recount a subtree by hand and compare with its sums; returns them."""
    count = prompt = expected = longest = 0
    for edge, child in node.children.items():
        if isinstance(child, Node):
            assert child.depth > node.depth
            assert child.path[: node.depth] == node.path[: node.depth]
            assert edge == child.path[node.depth]
            parts = audit(child)
            assert parts[0] > 0
        else:
            assert child.path[: node.depth] == node.path[: node.depth]
            parts = (1, child.prompt_tokens, child.expected_tokens, child.expected_tokens)
        count, prompt, expected = count + parts[0], prompt + parts[1], expected + parts[2]
        longest = max(longest, parts[3])
    assert (count, prompt, expected) == (node.count, node.prompt_tokens, node.expected_tokens)
    assert node.longest == longest
    return count, prompt, expected, longest


def check_picks(node: Node) -> None:
    children = list(node.children.values())
    if not children:
        return
    length = {id(c): c.longest if isinstance(c, Node) else c.expected_tokens for c in children}
    assert length[id(node.pick(Pick.LONGEST))] == max(length.values())
    sides = {
        Pick.COMPUTE: [c.arrival for c in children if c.prompt_tokens >= MIX * c.expected_tokens],
        Pick.MEMORY: [c.arrival for c in children if c.prompt_tokens < MIX * c.expected_tokens],
    }
    for rule, other in ((Pick.COMPUTE, Pick.MEMORY), (Pick.MEMORY, Pick.COMPUTE)):
        assert node.pick(rule).arrival == min(sides[rule] or sides[other])
    for child in children:
        if isinstance(child, Node):
            check_picks(child)


@settings(deadline=None)
@given(REQUESTS, st.randoms(use_true_random=False))
def test_sums_and_picks_hold_after_any_insertions_and_removals(specs, rng: random.Random):
    tree = OrderTree()
    tree.mix = MIX
    present: list[Waiting] = []
    pending = waiting(specs)
    while pending or present:
        if pending and (not present or rng.random() < 0.6):
            present.append(pending.pop())
            tree.insert(present[-1])
        else:
            tree.remove(present.pop(rng.randrange(len(present))))
        audit(tree.root)
        check_picks(tree.root)
        assert {w.key for w in tree} == {w.key for w in present}
        assert len(tree) == len(present)


@settings(deadline=None)
@given(REQUESTS, PAGES)
def test_nearest_shares_the_most_pages(specs, pages):
    interner = Interner()
    requests = waiting(specs, interner)
    path = interner.path(pages)
    tree = OrderTree()
    for request in requests:
        tree.insert(request)
    found = tree.first(tree.nearest(path), Pick.LONGEST)

    def shared(request: Waiting) -> int:
        return sum(a == b for a, b in zip(request.path, path, strict=False))

    assert shared(found) == max(map(shared, requests))


def test_a_private_prompt_makes_no_nodes():
    tree = OrderTree()
    for i in range(3):
        tree.insert(Waiting(i, "j", tuple(range(1000 * i, 1000 * i + 72)), 1155, 200, i))
    assert all(isinstance(child, Waiting) for child in tree.root.children.values())


def test_heaps_stay_small_when_one_child_changes_for_ever():
    tree = OrderTree()
    tree.insert(Waiting(0, "j", (1, 2), 10, 10, 0))
    for i in range(1, 2000):
        request = Waiting(i, "j", (1, i + 10), 10, 10, i)
        tree.insert(request)
        tree.remove(request)
    assert all(len(heap) < 200 for heap in tree.root.heaps)


def test_removing_an_unknown_request_is_an_error():
    tree = OrderTree()
    with pytest.raises(KeyError):
        tree.remove(Waiting(0, "j", (1,), 1, 1, 0))
