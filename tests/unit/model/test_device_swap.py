"""Pages that go to the host beside the steps and come back: in the order of the calls, however late the copies are."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.contract.runner_subjects import tiny_model
from tests.unit.model.two_lines import TwoLines

from nightmill_worker.engine.step import PoolShape
from nightmill_worker.model import device_swap
from nightmill_worker.model.device import Device
from nightmill_worker.model.device_swap import DeviceHostPages
from nightmill_worker.model.pool import KVPool

NUM_PAGES, NUM_HOST = 12, 9


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> KVPool:
    config, _, shape = tiny_model(tmp_path)
    small = PoolShape(num_pages=NUM_PAGES, page_size=4, bytes_per_token=shape.bytes_per_token)
    return KVPool(config, small, request.param)


def bits(pool: KVPool) -> torch.Tensor:
    return pool.planes.view(torch.uint8)


def random_bits(pool: KVPool, pages: list[int], seed: int) -> torch.Tensor:
    """NaN payloads among them."""
    shape = bits(pool)[:, pages].shape
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def randomise(pool: KVPool, pages: list[int], seed: int) -> None:
    bits(pool)[:, pages] = random_bits(pool, pages, seed)


def test_measuring_leaves_the_pool_as_it_was(pool: KVPool) -> None:
    host = DeviceHostPages(pool, 5, Device())
    assert host.shape.num_pages == 5
    assert host.shape.bytes_per_s > 0
    assert not pool.planes.any()


def test_no_host_pages_are_no_memory(pool: KVPool) -> None:
    device = Device()
    host = DeviceHostPages(pool, 0, device)
    assert host.shape.num_pages == 0
    assert host._host.nbytes == 0
    assert all(buffer.nbytes == 0 for buffer in host._buffers)
    assert device.traffic.to_device == 0


@st.composite
def moves(draw: st.DrawFn) -> list[tuple[str, list[int], list[int]]]:
    """swap_out, swap_in and writes of steps, of any pages, none twice in a call."""
    found = []
    for _ in range(draw(st.integers(1, 14))):
        count = draw(st.integers(1, 7))
        pages = draw(st.permutations(range(1, NUM_PAGES)))[:count]
        host = draw(st.permutations(range(NUM_HOST)))[:count]
        found.append((draw(st.sampled_from(["out", "in", "write"])), pages, host))
    return found


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(moves(), st.sampled_from([1, 2, 3, 100]), st.integers(0, 1 << 30), st.sampled_from([0.0, 0.5, 1.0]))
def test_copies_take_effect_in_the_order_of_the_calls(
    pool: KVPool, calls: list[tuple[str, list[int], list[int]]], max_copy: int, seed: int, likely: float
) -> None:
    """However far one line of work is ahead of the other."""
    device = TwoLines(seed, likely)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_swap, "_MAX_COPY_BYTES", max_copy * 4 * pool.shape.bytes_per_token)
        for name in ("gather_pages", "scatter_pages"):
            patch.setattr(device_swap, name, partial(later, device, getattr(device_swap, name)))
        host = DeviceHostPages(pool, NUM_HOST, device)
        randomise(pool, list(range(NUM_PAGES)), 1)
        expected = bits(pool).clone()
        saved = expected[:, 1 : NUM_HOST + 1].clone()
        host.swap_out(np.arange(1, NUM_HOST + 1, dtype=np.int32), np.arange(NUM_HOST, dtype=np.int32))
        for number, (kind, pages, host_pages) in enumerate(calls):
            ids, host_ids = np.array(pages, np.int32), np.array(host_pages, np.int32)
            match kind:
                case "out":
                    host.swap_out(ids, host_ids)
                    saved[:, host_pages] = expected[:, pages]
                case "in":
                    host.swap_in(host_ids, ids)
                    expected[:, pages] = saved[:, host_pages]
                case _:  # a step: when swap_out has returned, its pages may be anyone's
                    device.ask(partial(randomise, pool, pages, number))
                    expected[:, pages] = random_bits(pool, pages, number)
            ids.fill(0)
            host_ids.fill(0)
        device.finish()
    assert torch.equal(bits(pool), expected)
    assert torch.equal(host._host.view(torch.uint8).transpose(0, 1), saved)


def later(device: TwoLines, work: Callable[..., object], *args: object) -> None:
    """A kernel: done when its turn has come."""
    device.ask(lambda: work(*args))


def test_one_gather_and_a_copy_for_each_run_of_host_pages(pool: KVPool) -> None:
    device = Device()
    host = DeviceHostPages(pool, NUM_HOST, device)
    before = device.traffic.snapshot()
    host.swap_out(np.array([3, 9, 4, 1, 7], np.int32), np.array([2, 3, 4, 8, 0], np.int32))
    used = device.traffic.since(before)
    assert (used.to_host, used.to_device, used.waits) == (3, 1, 0)  # three runs; the page ids
