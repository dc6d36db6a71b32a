"""The host pool: each page is free or held, and freed once."""

import numpy as np
import pytest

from nightmill.errors import EngineError
from nightmill_worker.engine.host_pool import HostPool


def test_pages_are_neighbours_while_the_pool_is_young():
    pool = HostPool(8)
    assert pool.allocate(3).tolist() == [0, 1, 2]
    assert pool.allocate(2).tolist() == [3, 4]
    assert (pool.num_used, pool.num_free) == (5, 3)
    assert pool.used_pages().tolist() == [0, 1, 2, 3, 4]


def test_freed_pages_are_used_again_first():
    pool = HostPool(8)
    first = pool.allocate(3)
    pool.allocate(2)
    pool.free(first)
    assert pool.allocate(4).tolist() == [0, 1, 2, 5]


def test_more_than_is_free_is_refused():
    pool = HostPool(2)
    with pytest.raises(EngineError, match="3 pages wanted, 2 are free"):
        pool.allocate(3)
    assert HostPool(0).num_free == 0


def test_freeing_twice_is_refused():
    pool = HostPool(4)
    pages = pool.allocate(2)
    pool.free(pages)
    with pytest.raises(EngineError, match="free already"):
        pool.free(pages[:1])
    assert pool.num_free == 4


def test_on_free_gets_the_pages():
    pool, freed = HostPool(4), []
    pool.on_free = lambda pages: freed.extend(pages.tolist())
    pool.free(pool.allocate(3))
    assert sorted(freed) == [0, 1, 2]
    assert np.array_equal(np.sort(pool.allocate(4)), np.arange(4))
