import numpy as np
import pytest

from nightmill.errors import EngineError
from nightmill_worker.engine.page_pool import PagePool
from nightmill_worker.engine.step import PoolShape


def make_pool(num_pages: int = 6) -> PagePool:
    return PagePool(PoolShape(num_pages=num_pages, page_size=4, bytes_per_token=1))


def counts(pool: PagePool) -> tuple[int, int, int, int]:
    return pool.num_free, pool.num_active, pool.num_cached, pool.num_in_flight


def test_null_page_is_never_allocated():
    pool = make_pool()
    assert sorted(pool.allocate(5).tolist()) == [1, 2, 3, 4, 5]
    assert counts(pool) == (0, 5, 0, 0)
    with pytest.raises(EngineError, match="1 pages wanted, 0 are free"):
        pool.allocate(1)


def test_page_is_free_again_when_its_last_holder_lets_go():
    pool = make_pool()
    pages = pool.allocate(2)
    pool.pin(pages[:1])
    pool.unpin(pages)
    assert counts(pool) == (4, 1, 0, 0)
    pool.unpin(pages[:1])
    assert counts(pool) == (5, 0, 0, 0)


def test_published_page_is_cached_and_can_be_revived():
    pool = make_pool()
    pages = pool.allocate(1)
    pool.publish(int(pages[0]))
    pool.unpin(pages)
    assert counts(pool) == (4, 0, 1, 0)
    pool.pin(pages)
    assert counts(pool) == (4, 1, 0, 0)
    pool.unpin(pages)
    pool.drop(int(pages[0]))
    assert counts(pool) == (5, 0, 0, 0)


def test_dropping_a_held_page_does_not_free_it():
    pool = make_pool()
    pages = pool.allocate(1)
    pool.publish(int(pages[0]))
    pool.drop(int(pages[0]))
    assert counts(pool) == (4, 1, 0, 0)
    pool.unpin(pages)
    assert counts(pool) == (5, 0, 0, 0)


def test_page_in_flight_is_neither_free_nor_lost():
    pool = make_pool()
    pages = pool.allocate(3)
    pool.retire(pages)
    assert counts(pool) == (2, 0, 0, 3)
    assert not set(pages.tolist()) & set(pool.free_pages().tolist())
    pool.land(pages)
    assert counts(pool) == (5, 0, 0, 0)


def test_freed_pages_are_announced():
    pool = make_pool()
    freed: list[int] = []
    pool.on_free = lambda pages: freed.extend(pages.tolist())
    pages = pool.allocate(2)
    pool.publish(int(pages[0]))
    pool.unpin(pages)
    assert freed == [int(pages[1])]


def test_pool_without_a_usable_page_is_refused():
    with pytest.raises(EngineError, match="needs the null page and one more"):
        make_pool(1)


def test_num_pages_rounds_up():
    pool = make_pool()
    assert [pool.num_pages(n) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert np.all(pool.refcount == 0)
