"""The real demo model through the real engine: 64 prompts, greedy, against transformers.

transformers is teacher-forced with what the engine generated: one forward gives its choice after every prefix, which
is its own greedy path up to the first divergence, and nothing after a first divergence is judged.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.parity.demo_generation import Schedule, build_runner, generate, load_reference, reference_steps
from tests.parity.paged_driver import PagedDriver

from nightmill_worker.bench.comparator import Comparison, compare_greedy
from nightmill_worker.bench.corpus import corpus_texts
from nightmill_worker.feed.tokenizer import Tokenizer
from nightmill_worker.model.runner import ModelRunner

pytestmark = pytest.mark.demo_model

LENGTHS = (1, 2, 3, 5, 8, 13, 15, 16, 17, 21, 31, 32, 33, 47, 64, 90)
SHARED = 35  # tokens that a quarter of the prompts begin with: two whole pages and a part


@pytest.fixture(scope="module")
def prompts(demo_model_dir: Path) -> list[tuple[int, ...]]:
    tokenizer = Tokenizer.load(demo_model_dir)
    texts = [tokenizer.encode(text[200:1600]) for text in corpus_texts()[:64]]
    cut = [tuple(ids[: LENGTHS[i % 16]]) for i, ids in enumerate(texts)]
    shared = tuple(texts[0][:SHARED])
    return [shared + ids if i % 4 == 3 else ids for i, ids in enumerate(cut)]


def compare(model: Any, prompts: Sequence[tuple[int, ...]], generated: list[list[int]], dtype: str) -> Comparison:
    reference = [reference_steps(model, p, g) for p, g in zip(prompts, generated, strict=True)]
    return compare_greedy(reference, generated, dtype=dtype)


CRAMPED = Schedule(max_num_seqs=16, max_num_batched_tokens=48)
ROOMY = Schedule(enable_prefix_caching=False)


FLOAT32_TOLERANCE = 1e-4
"""Relative to the largest logit: 30 layers of roundings of 6e-8 each, with room."""
BFLOAT16_EXCESS = 1.25
"""Our mean error in bfloat16 over transformers' own, both against float32: another order, the same precision."""


def our_logits(runner: ModelRunner, prompt: tuple[int, ...]) -> torch.Tensor:
    """float32 [len(prompt), vocab], computed in chunks of 17 over shuffled pages."""
    driver = PagedDriver(runner)
    sequence, found = driver.add(prompt), []
    while sequence.num_computed < len(prompt):
        count = min(17, len(prompt) - sequence.num_computed)
        found.append(runner.compute_logits(driver.plan([(sequence, count)], every_token=True)).float())
    return torch.cat(found)


@torch.inference_mode()
def test_logits_equal_transformers(demo_model_dir: Path, prompts: list[tuple[int, ...]]) -> None:
    exact, rounded = (load_reference(demo_model_dir, dtype) for dtype in (torch.float32, torch.bfloat16))
    ours = {dtype: build_runner(demo_model_dir, Schedule(), dtype) for dtype in ("float32", "bfloat16")}
    our_error = their_error = 0.0
    for prompt in prompts[3::8]:
        truth, theirs = (m(torch.tensor([prompt]), use_cache=False).logits[0].float() for m in (exact, rounded))
        error = float((our_logits(ours["float32"], prompt) - truth).abs().max() / truth.abs().max())
        assert error < FLOAT32_TOLERANCE, f"length {len(prompt)}: {error:.2e}"
        our_error += float((our_logits(ours["bfloat16"], prompt) - truth).abs().mean())
        their_error += float((theirs - truth).abs().mean())
    assert our_error < BFLOAT16_EXCESS * their_error, f"{our_error:.4f} against {their_error:.4f}"


def test_float32_equals_transformers_whatever_the_schedule(
    demo_model_dir: Path, prompts: list[tuple[int, ...]], record_property: Any
) -> None:
    cramped = generate(demo_model_dir, prompts, CRAMPED, "float32")
    comparison = compare(load_reference(demo_model_dir, torch.float32), prompts, cramped, "float32")
    record_property("near_ties", len(comparison.near_ties))
    assert not comparison.failures, str(comparison)
    assert not comparison.near_ties, str(comparison)
    assert generate(demo_model_dir, prompts, ROOMY, "float32") == cramped


def test_bfloat16_differs_from_transformers_only_at_near_ties(
    demo_model_dir: Path, prompts: list[tuple[int, ...]], record_property: Any
) -> None:
    generated = generate(demo_model_dir, prompts, CRAMPED, "bfloat16")
    comparison = compare(load_reference(demo_model_dir, torch.bfloat16), prompts, generated, "bfloat16")
    record_property("near_ties", len(comparison.near_ties))
    assert not comparison.failures, str(comparison)
    # Correct engines agree on most short answers: many near ties would mean a loss of precision.
    assert comparison.num_identical > len(prompts) // 2, str(comparison)
