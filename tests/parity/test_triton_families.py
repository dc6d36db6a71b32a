"""Every family's layers through the Triton kernels are what they are through the CPU's: a prefill, then a decode."""

from pathlib import Path

import pytest
import torch
from tests.parity.paged_driver import PagedDriver
from tests.parity.tiny_models import TINY, save_tiny

from nightmill.records import EngineOptions, ModelSpec
from nightmill_kernels.backend import use_triton
from nightmill_worker.model.runner import ModelRunner, ModelRunnerConfig

pytest.importorskip("triton")

PAGE_SIZE = 8
LENGTH = 10
"""Longer than a page and than the models' window; the interpreter takes 10 ms for each program."""

TOLERANCE = 2e-5
"""Of the largest logit: tens of fp32 roundings through the layers."""

EACH_WAY = ("llama", "qwen3", "gemma3", "olmo2", "phi3-partial", "smollm3")
"""Plain; head norms; their weight offset and windows; a norm over all heads; partial rotation; layers without any."""


def logits(directory: Path) -> torch.Tensor:
    """[LENGTH + 1, vocab] of every position of a sequence, and of a shorter one beside it."""
    runner = ModelRunnerConfig(
        model_dir=directory,
        spec=ModelSpec(model=str(directory), dtype="float32", max_model_len=32),
        options=EngineOptions(page_size=PAGE_SIZE, pool_bytes=1 << 20),
    ).build()
    assert isinstance(runner, ModelRunner)
    driver = PagedDriver(runner)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 131, (n,), generator=generator).tolist() for n in (LENGTH + 1, 2)]
    sequences = [driver.add(prompt) for prompt in prompts]
    parts = []
    for counts in ((LENGTH, 1), (1, 1)):
        work = list(zip(sequences, counts, strict=True))
        parts.append(runner.compute_logits(driver.plan(work, every_token=True)))
    return torch.cat(parts)


@pytest.mark.parametrize(
    "name", [*EACH_WAY, *(pytest.param(name, marks=pytest.mark.long) for name in TINY if name not in EACH_WAY)]
)
def test_triton_layers_equal_the_cpus(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path)
    want = logits(tmp_path)
    with use_triton():
        got = logits(tmp_path)
    error = (got - want).abs().max() / want.abs().max()
    assert error < TOLERANCE, f"{name}: {error:.2e}"
