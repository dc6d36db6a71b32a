"""The demo model's answers, greedy and seeded, do not depend on how they are scheduled (I11, I12).

Pages, chunks, prefix index, batch size, policies, shared attention, a pool that is too small. Exact in float32. In
bfloat16 a first divergence is allowed only at a near tie of transformers' own logits, for draws with the noise added.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.parity.demo_generation import Schedule, answers_of, load_reference, reference_logits, reference_steps
from tests.parity.drawn_step import drawn_steps
from tests.parity.engine_runs import SEEDED, requests_of

from nightmill.sampling import SamplingParams
from nightmill_worker.bench.comparator import ReferenceStep, compare_greedy
from nightmill_worker.bench.corpus import corpus_texts
from nightmill_worker.engine.request import Request
from nightmill_worker.feed.tokenizer import Tokenizer

pytestmark = pytest.mark.demo_model

LENGTHS = (1, 15, 16, 17, 31, 33, 48, 70)
SHARED = 35  # tokens that half of the prompts begin with: two whole pages of 16 and a part
MAX_TOKENS = 8

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
    "default policies": replace(BASE, policies="planned", max_num_seqs=8, max_num_batched_tokens=48),
    "small pool": replace(BASE, pool_bytes=20 << 20),
    "small pool, default policies": replace(BASE, policies="planned", pool_bytes=20 << 20),
}


@pytest.fixture(scope="module")
def requests(demo_model_dir: Path) -> list[Request]:
    """16 greedy rows, and 8 that draw after the prompts of every second one."""
    tokenizer = Tokenizer.load(demo_model_dir)
    texts = [tokenizer.encode(text[100:1200]) for text in corpus_texts()[64:80]]
    cut = [tuple(ids[: LENGTHS[i % len(LENGTHS)]]) for i, ids in enumerate(texts)]
    shared = tuple(texts[0][:SHARED])
    prompts = [shared + ids if i % 2 else ids for i, ids in enumerate(cut)]
    prompts += [prompts[i] for i in (0, 3, 4, 7, 8, 11, 12, 15)]
    return requests_of(prompts, [SamplingParams()] * 16 + list(SEEDED), max_tokens=MAX_TOKENS)


@pytest.fixture(scope="module")
def float32_answers(demo_model_dir: Path, requests: list[Request]) -> list[list[int]]:
    return answers_of(demo_model_dir, requests, BASE, "float32").tokens


def variants(*usual: str) -> list[Any]:
    """All of them, the others than `usual` marked long."""
    return [pytest.param(name, marks=() if name in usual else pytest.mark.long) for name in VARIANTS]


@pytest.mark.parametrize(
    "variant",
    variants("page 64", "chunk 1", "chunk 15", "no prefix index", "max_num_seqs 1", "default policies", "small pool"),
)
def test_float32_answers_are_identical(
    demo_model_dir: Path, requests: list[Request], float32_answers: list[list[int]], variant: str
) -> None:
    answers = answers_of(demo_model_dir, requests, VARIANTS[variant], "float32")
    assert answers.tokens == float32_answers


@pytest.fixture(scope="module")
def bfloat16_reference(demo_model_dir: Path, requests: list[Request]) -> list[Sequence[ReferenceStep]]:
    """transformers' logits along the answers of the base schedule."""
    model, base = load_reference(demo_model_dir, torch.bfloat16), answers_of(demo_model_dir, requests, BASE, "bfloat16")
    return [
        reference_steps(model, request.prompt, tokens, follow=True)
        if i < 16
        else drawn_steps(request, tokens, reference_logits(model, request.prompt, tokens).numpy(), "bfloat16")
        for i, (request, tokens) in enumerate(zip(requests, base.tokens, strict=True))
    ]


@pytest.mark.parametrize(
    "variant",
    variants("chunk 1", "chunk 17", "max_num_seqs 8", "default policies", "small pool, default policies"),
)
def test_bfloat16_answers_differ_only_at_near_ties(
    demo_model_dir: Path,
    requests: list[Request],
    bfloat16_reference: list[Sequence[ReferenceStep]],
    variant: str,
    record_property: Any,
) -> None:
    answers = answers_of(demo_model_dir, requests, VARIANTS[variant], "bfloat16")
    comparison = compare_greedy(bfloat16_reference, answers.tokens, dtype="bfloat16")
    record_property("near_ties", len(comparison.near_ties))
    assert not comparison.failures, str(comparison)
