"""The demo model's greedy answers do not depend on how they are scheduled: pages, chunks, prefix index, batch size.

Exact in float32. In bfloat16 a first divergence is allowed only at a near tie of transformers' own logits.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.parity.demo_generation import Schedule, generate, load_reference, reference_steps

from nightmill_worker.bench.comparator import compare_greedy
from nightmill_worker.bench.corpus import corpus_texts
from nightmill_worker.feed.tokenizer import Tokenizer

pytestmark = pytest.mark.demo_model

LENGTHS = (1, 15, 16, 17, 31, 33, 48, 70)
SHARED = 35  # tokens that half of the prompts begin with: two whole pages of 16 and a part

BASE = Schedule()
VARIANTS = {
    "page 32": replace(BASE, page_size=32),
    "page 64": replace(BASE, page_size=64),
    "chunk 1": replace(BASE, max_prefill_chunk=1),
    "chunk 15": replace(BASE, max_prefill_chunk=15),
    "chunk 16": replace(BASE, max_prefill_chunk=16),
    "chunk 17": replace(BASE, max_prefill_chunk=17),
    "no prefix index": replace(BASE, enable_prefix_caching=False),
    "max_num_seqs 1": replace(BASE, max_num_seqs=1),
    "max_num_seqs 8": replace(BASE, max_num_seqs=8),
}


@pytest.fixture(scope="module")
def prompts(demo_model_dir: Path) -> list[tuple[int, ...]]:
    tokenizer = Tokenizer.load(demo_model_dir)
    texts = [tokenizer.encode(text[100:1200]) for text in corpus_texts()[64:80]]
    cut = [tuple(ids[: LENGTHS[i % len(LENGTHS)]]) for i, ids in enumerate(texts)]
    shared = tuple(texts[0][:SHARED])
    return [shared + ids if i % 2 else ids for i, ids in enumerate(cut)]


@pytest.fixture(scope="module")
def float32_answers(demo_model_dir: Path, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    return generate(demo_model_dir, prompts, BASE, "float32")


@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_answers_are_identical(
    demo_model_dir: Path, prompts: list[tuple[int, ...]], float32_answers: list[list[int]], variant: str
) -> None:
    assert generate(demo_model_dir, prompts, VARIANTS[variant], "float32") == float32_answers


@pytest.fixture(scope="module")
def bfloat16_base(demo_model_dir: Path, prompts: list[tuple[int, ...]]) -> tuple[Any, list[list[int]]]:
    return load_reference(demo_model_dir, torch.bfloat16), generate(demo_model_dir, prompts, BASE, "bfloat16")


@pytest.mark.parametrize("variant", VARIANTS)
def test_bfloat16_answers_differ_only_at_near_ties(
    demo_model_dir: Path,
    prompts: Sequence[tuple[int, ...]],
    bfloat16_base: tuple[Any, list[list[int]]],
    variant: str,
    record_property: Any,
) -> None:
    model, base = bfloat16_base
    answers = generate(demo_model_dir, prompts, VARIANTS[variant], "bfloat16")
    reference = [reference_steps(model, p, g, follow=True) for p, g in zip(prompts, base, strict=True)]
    comparison = compare_greedy(reference, answers, dtype="bfloat16")
    record_property("near_ties", len(comparison.near_ties))
    assert not comparison.failures, str(comparison)
