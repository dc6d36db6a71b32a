"""Our decoder's logits and greedy tokens are transformers', for every family, through the page pool."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.parity.paged_driver import PagedDriver
from tests.parity.tiny_models import LENGTH, TINY, save_tiny

from nightmill.records import EngineOptions, ModelSpec
from nightmill_worker.bench.comparator import ReferenceStep, compare_greedy
from nightmill_worker.model.runner import ModelRunner, ModelRunnerConfig

PAGE_SIZE = 8
LOGIT_TOLERANCE = 2e-5
"""Relative to the largest logit: some tens of fp32 roundings (6e-8 each) through the layers, with room."""


def build(directory: Path, dtype: str = "float32") -> ModelRunner:
    return ModelRunnerConfig(
        model_dir=directory,
        spec=ModelSpec(model=str(directory), dtype=dtype, max_model_len=64),
        options=EngineOptions(page_size=PAGE_SIZE, pool_bytes=4 << 20),
    ).build()


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 131, (n,), generator=generator).tolist() for n in (LENGTH, 1, PAGE_SIZE, 17)]


def reference_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].float()


def reference_greedy(model: Any, prompt: list[int], max_tokens: int) -> list[ReferenceStep]:
    tokens, steps = list(prompt), []
    for _ in range(max_tokens):
        logits = reference_logits(model, tokens)[-1]
        best = logits.topk(8)
        candidates = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        steps.append(ReferenceStep(int(logits.argmax()), candidates, float(logits.abs().max())))
        tokens.append(steps[-1].token)
    return steps


@pytest.mark.parametrize("name", TINY)
def test_logits_equal_transformers_at_every_position(name: str, tmp_path: Path) -> None:
    model = save_tiny(name, tmp_path)
    driver = PagedDriver(build(tmp_path))
    runner = driver.runner
    assert isinstance(runner, ModelRunner)
    for chunk in (LENGTH, PAGE_SIZE + 1, PAGE_SIZE, PAGE_SIZE - 1, 1):
        sequences = [driver.add(prompt) for prompt in prompts()]
        found: list[list[torch.Tensor]] = [[] for _ in sequences]
        while any(s.num_computed < len(s.tokens) for s in sequences):
            rows = [i for i, s in enumerate(sequences) if s.num_computed < len(s.tokens)]
            work = [(sequences[i], min(chunk, len(sequences[i].tokens) - sequences[i].num_computed)) for i in rows]
            logits = runner.compute_logits(driver.plan(work, every_token=True))
            for i, part in zip(rows, logits.split([count for _, count in work]), strict=True):
                found[i].append(part)
        for sequence, parts in zip(sequences, found, strict=True):
            expected = reference_logits(model, sequence.tokens)
            error = (torch.cat(parts) - expected).abs().max() / expected.abs().max()
            assert error < LOGIT_TOLERANCE, f"{name}, chunk {chunk}, length {len(sequence.tokens)}: {error:.2e}"
            driver.release(sequence)


@pytest.mark.parametrize("name", TINY)
def test_greedy_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    model = save_tiny(name, tmp_path)
    reference = [reference_greedy(model, prompt, 12) for prompt in prompts()]
    actual = PagedDriver(build(tmp_path)).generate(prompts(), max_tokens=12, chunk=PAGE_SIZE + 1)
    comparison = compare_greedy(reference, actual, dtype="float32")
    assert not comparison.failures, str(comparison)
    assert not comparison.near_ties, str(comparison)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "olmo2"])
def test_bfloat16_greedy_tokens_differ_only_at_near_ties(name: str, tmp_path: Path) -> None:
    model = save_tiny(name, tmp_path, dtype=torch.bfloat16)
    reference = [reference_greedy(model, prompt, 12) for prompt in prompts()]
    actual = PagedDriver(build(tmp_path, "bfloat16")).generate(prompts(), max_tokens=12)
    comparison = compare_greedy(reference, actual, dtype="bfloat16")
    assert not comparison.failures, str(comparison)


def test_tokens_do_not_depend_on_chunks_batch_or_page_size(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path)
    together = PagedDriver(build(tmp_path)).generate(prompts(), max_tokens=12)
    alone = [PagedDriver(build(tmp_path), seed=1).generate([p], max_tokens=12, chunk=3)[0] for p in prompts()]
    assert together == alone
