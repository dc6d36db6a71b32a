"""The demo model, greedy and seeded, preempted by swap and by recompute: some steps here, every step in the long run.

Exact in float32. In bfloat16 recomputing in one chunk rounds otherwise than decoding did, so a first divergence is
judged by the comparator, against transformers' own logits; swapped pages come back bit for bit, and so do the answers
but where other batches multiply in other shapes.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.parity.demo_generation import (
    MAX_MODEL_LEN,
    load_reference,
    reference_logits,
    reference_steps,
    shared_runner,
)
from tests.parity.drawn_step import drawn_steps
from tests.parity.engine_runs import POLICIES, SEEDED, answer, answer_preempted, requests_of

from nightmill.sampling import SamplingParams
from nightmill_worker.bench.comparator import ReferenceStep, compare_greedy
from nightmill_worker.bench.corpus import corpus_texts
from nightmill_worker.engine.options import PreemptionMode
from nightmill_worker.engine.request import Request
from nightmill_worker.feed.tokenizer import Tokenizer
from nightmill_worker.model.runner import ModelRunner

pytestmark = pytest.mark.demo_model

MAX_TOKENS = 8
LIMITS = replace(
    POLICIES["planned"], max_model_len=MAX_MODEL_LEN, max_num_seqs=12, max_num_batched_tokens=96, max_prefill_chunk=40
)
NUM_STEPS = 13  # of an undisturbed run; checked below
USUAL = {("float32", 3), ("float32", 9), ("bfloat16", 6), ("bfloat16", 12)}
EVERY_STEP = [
    pytest.param(dtype, mode, at, marks=() if (dtype, at) in USUAL else pytest.mark.long)
    for dtype in ("float32", "bfloat16")
    for mode in (PreemptionMode.SWAP, PreemptionMode.RECOMPUTE)
    for at in range(1, NUM_STEPS)
]
Base = tuple[list[list[int]], list[Sequence[ReferenceStep]]]


@pytest.fixture(scope="module")
def requests(demo_model_dir: Path) -> list[Request]:
    """Seven rows that share 144 tokens, five that share nothing; every second one draws."""
    tokenizer = Tokenizer.load(demo_model_dir)
    texts = [tokenizer.encode(text[100:1200]) for text in corpus_texts()[40:52]]
    stem = tuple(texts[0][:144])
    prompts = [(stem if r < 7 else ()) + tuple(ids[-2 - 5 * r :]) for r, ids in enumerate(texts)]
    samplings = [SamplingParams() if r % 2 else SEEDED[r // 2] for r in range(12)]
    return requests_of(prompts, samplings, max_tokens=MAX_TOKENS)


def runner_of(directory: Path, dtype: str) -> ModelRunner:
    return shared_runner(directory, 16, 128 << 20, dtype)


_bases: dict[str, Base] = {}


def base_of(directory: Path, requests: list[Request], dtype: str) -> Base:
    """Undisturbed answers, and transformers' logits along them; in float32 nothing but equality is accepted."""
    if dtype not in _bases:
        answers = answer(runner_of(directory, dtype), requests, LIMITS)
        assert answers.stats.steps == NUM_STEPS
        assert answers.stats.shared_attention_rows > 20
        steps: list[Sequence[ReferenceStep]] = []
        if dtype == "bfloat16":
            model = load_reference(directory, torch.bfloat16)
            for request, tokens in zip(requests, answers.tokens, strict=True):
                if request.sampling == SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True):
                    steps.append(reference_steps(model, request.prompt, tokens, follow=True))
                else:
                    logits = reference_logits(model, request.prompt, tokens).numpy()
                    steps.append(drawn_steps(request, tokens, logits, dtype))
        _bases[dtype] = (answers.tokens, steps)
    return _bases[dtype]


@pytest.mark.parametrize(("dtype", "mode", "at"), EVERY_STEP)
def test_preempted_at_a_step(
    demo_model_dir: Path, requests: list[Request], dtype: str, mode: PreemptionMode, at: int, record_property: Any
) -> None:
    base, steps = base_of(demo_model_dir, requests, dtype)
    answers = answer_preempted(runner_of(demo_model_dir, dtype), requests, LIMITS, mode, lambda step: step == at)
    if dtype == "float32":
        assert answers.tokens == base
        return
    comparison = compare_greedy(steps, answers.tokens, dtype=dtype)
    record_property("near_ties", len(comparison.near_ties))
    assert not comparison.failures, str(comparison)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shared_attention_off(demo_model_dir: Path, requests: list[Request], dtype: str) -> None:
    base, _ = base_of(demo_model_dir, requests, dtype)
    limits = replace(LIMITS, enable_shared_attention=False)
    assert answer(runner_of(demo_model_dir, dtype), requests, limits).tokens == base
