"""Host pages of the model's runner: what is swapped out comes back bit for bit, wherever to."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.parity.paged_driver import PagedDriver
from tests.unit.model.test_runner import TINY

from nightmill.records import EngineOptions, ModelSpec
from nightmill_worker.engine.step import Swaps
from nightmill_worker.model import swap
from nightmill_worker.model.config import ModelConfig
from nightmill_worker.model.pool import KVPool, plan_host_pages, plan_pool
from nightmill_worker.model.runner import ModelRunnerConfig
from nightmill_worker.model.swap import HostPages


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> KVPool:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    config = ModelConfig.from_directory(tmp_path)
    shape = replace(plan_pool(config, EngineOptions(page_size=4), dtype="float32", max_model_len=64), num_pages=12)
    return KVPool(config, shape, request.param)


def fill(pool: KVPool) -> torch.Tensor:
    """Random bits, NaN payloads among them; a copy of them."""
    bits = pool.planes.view(torch.uint8)
    bits.copy_(torch.randint(0, 256, bits.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1)))
    return bits.clone()


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)


def test_measuring_leaves_the_pool_as_it_was(pool: KVPool):
    host = HostPages(pool, 5)
    assert host.shape.num_pages == 5
    assert host.shape.bytes_per_s > 0
    assert not pool.planes.any()


@pytest.mark.parametrize("max_copy", [1, 2, 100])
@pytest.mark.parametrize("host_ids", [(0, 1, 2, 3), (6, 2, 3, 0), (3, 2, 1, 0), (4, 5, 6, 1)])
def test_pages_come_back_elsewhere_bit_for_bit(pool: KVPool, host_ids, max_copy, monkeypatch):
    host = HostPages(pool, 7)
    monkeypatch.setattr(host, "_max_copy", max_copy)
    before = fill(pool)
    host.swap_out(ids(7, 1, 2, 11), ids(*host_ids))
    pool.planes.fill_(float("nan"))
    host.swap_in(ids(*host_ids), ids(3, 4, 10, 5))
    after = pool.planes.view(torch.uint8)
    for old, new in zip((7, 1, 2, 11), (3, 4, 10, 5), strict=True):
        assert torch.equal(after[:, new], before[:, old])
    assert pool.planes[:, [0, 1, 2, 6, 7, 8, 9, 11]].isnan().all()


def test_copies_are_bounded(pool: KVPool, monkeypatch):
    monkeypatch.setattr(swap, "_MAX_COPY_BYTES", 3 * 4 * pool.shape.bytes_per_token)
    host = HostPages(pool, 8)
    assert list(host._runs(np.arange(8))) == [(0, 3), (3, 6), (6, 8)]


def test_size_of_the_host_pool(pool: KVPool):
    shape = replace(pool.shape, num_pages=41)
    assert plan_host_pages(shape, EngineOptions()) == 10
    assert plan_host_pages(shape, EngineOptions(swap_bytes=0)) == 0
    assert plan_host_pages(shape, EngineOptions(swap_bytes=3 * 4 * shape.bytes_per_token + 5)) == 3


def test_runner_swaps_between_steps(tmp_path: Path):
    """A sequence computed in half, swapped out, and restored to other pages draws what it would have drawn."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    config = ModelRunnerConfig(
        model_dir=tmp_path,
        spec=ModelSpec(model="tiny", dtype="float32", load_format="dummy"),
        options=EngineOptions(page_size=4, pool_bytes=1 << 20),
    )
    prompt = list(range(1, 20))
    expected = PagedDriver(config.build()).generate([prompt], max_tokens=1)
    runner = config.build()
    assert isinstance(runner, Swaps)
    driver = PagedDriver(runner)
    sequence = driver.add(prompt)
    runner.run(driver.plan([(sequence, 10)]))
    old = ids(*sequence.pages)
    runner.swap_out(old, ids(2, 0, 1))
    sequence.pages = [driver._free.pop() for _ in old]
    runner.swap_in(ids(2, 0, 1), ids(*sequence.pages))
    output = runner.run(driver.plan([(sequence, 9)]))
    assert output.tokens.tolist() == expected[0]
    runner.close()
    with pytest.raises(RuntimeError, match="closed"):
        runner.swap_out(ids(1), ids(0))
