import numpy as np
import pytest

from nightmill_worker.engine.page_pool import PagePool
from nightmill_worker.engine.prefix_index import Node, PrefixIndex
from nightmill_worker.engine.step import PoolShape


class Cache:
    """An index with a pool, filled chain by chain."""

    def __init__(self, num_pages: int = 10) -> None:
        self.pool = PagePool(PoolShape(num_pages=num_pages, page_size=2, bytes_per_token=1))
        self.index = PrefixIndex(self.pool)

    def cache(self, *pages: tuple[int, ...]) -> list[Node]:
        """Publish a chain and let go of it, as a sequence that has ended."""
        chain: list[Node] = []
        held = []
        for tokens in pages:
            node = self.index.intern(chain[-1] if chain else self.index.root, tokens)
            self.index.acquire(node)
            chain.append(node)
            if not node.page:
                page = self.pool.allocate(1)
                self.index.publish(node, int(page[0]))
                held.append(page)
        for page in held:
            self.pool.unpin(page)
        self.index.touch(chain[-1])
        for node in chain:
            self.index.release(node)
        return chain


@pytest.fixture
def cache() -> Cache:
    return Cache()


def test_equal_prefixes_are_one_node(cache: Cache):
    first = cache.cache((1, 2), (3, 4))
    assert cache.index.intern(cache.index.root, (1, 2)) is first[0]
    assert cache.index.intern(first[0], (3, 4)) is first[1]


def test_same_tokens_after_another_prefix_are_another_node(cache: Cache):
    first = cache.cache((1, 2), (3, 4))
    second = cache.cache((5, 6), (3, 4))
    assert first[1] is not second[1]
    assert first[1].page != second[1].page


def test_least_recently_used_goes_first_and_leaf_before_parent(cache: Cache):
    old = cache.cache((1, 2), (3, 4))
    new = cache.cache((5, 6), (7, 8))
    gone = []
    for _ in range(4):
        before = {node for node in (*old, *new) if node.page}
        cache.index.evict(1)
        gone += [node for node in before if not node.page]
    assert gone == [old[1], old[0], new[1], new[0]]
    assert cache.pool.num_free == cache.pool.num_usable
    assert len(cache.index) == 0


def test_parent_is_as_recent_as_its_last_child(cache: Cache):
    shared = cache.cache((1, 2), (3, 4))
    other = cache.cache((9, 9))
    cache.cache((1, 2), (5, 6))  # uses (1, 2) again, later than `other`
    cache.index.evict(2)
    assert not shared[1].page
    assert not other[0].page
    assert shared[0].page


def test_held_page_is_not_evicted(cache: Cache):
    chain = cache.cache((1, 2))
    cache.cache((3, 4))
    page = chain[0].page
    cache.pool.pin(np.array([page], np.int32))
    cache.index.evict(1)
    assert chain[0].page == page


def test_node_outlives_its_page_while_somebody_refers_to_it(cache: Cache):
    chain = cache.cache((1, 2), (3, 4))
    cache.index.acquire(chain[1])
    cache.index.evict(2)
    assert cache.index.intern(chain[0], (3, 4)) is chain[1]
    assert len(cache.index) == 2
    cache.index.release(chain[1])
    assert len(cache.index) == 0


def test_offers_do_not_pile_up(cache: Cache):
    chain = cache.cache((1, 2))
    page = np.array([chain[0].page], np.int32)
    for _ in range(1000):
        cache.pool.pin(page)
        cache.pool.unpin(page)
        cache.index.touch(chain[0])
    assert len(cache.index._evictable) < 200
    cache.index.evict(1)
    assert not chain[0].page
