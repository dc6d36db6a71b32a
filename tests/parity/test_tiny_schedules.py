"""Tiny float32 models, greedy and seeded, under every schedule (I11, I12): all policies, pools that are too small."""

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.parity.engine_runs import POLICIES, SEEDED, Answers, answer, requests_of
from tests.parity.tiny_models import save_tiny

from nightmill.records import EngineOptions, ModelSpec
from nightmill.sampling import SamplingParams
from nightmill_worker.engine.options import LoopOptions, PreemptionMode
from nightmill_worker.engine.request import Request
from nightmill_worker.model.runner import ModelRunner, ModelRunnerConfig

MAX_MODEL_LEN = 64
MAX_TOKENS = 12
VOCAB_SIZE = 131
# Heads of 8 run on the torch reference, of 16 in C; gemma2 has windows and soft caps.
FAMILIES = ("llama", "qwen3", pytest.param("gemma2", marks=pytest.mark.long))

SMALL = 20  # usable pages of 4: one sequence of MAX_MODEL_LEN and a bit
BASE = LoopOptions(max_model_len=MAX_MODEL_LEN, max_num_seqs=32, max_num_batched_tokens=256)
CHUNKS = {f"chunk {n}": replace(BASE, max_prefill_chunk=n) for n in (1, 3, 4, 5)}
VARIANTS: dict[str, tuple[int, int | None, LoopOptions]] = {  # page size, usable pages, limits
    "page 4": (4, None, BASE),
    "page 8": (8, None, BASE),
    "page 32": (32, None, BASE),
    **{name: (4, None, limits) for name, limits in CHUNKS.items()},
    "no prefix index": (4, None, replace(BASE, enable_prefix_caching=False)),
    "no shared attention": (4, None, replace(BASE, enable_shared_attention=False)),
    "one at a time": (4, None, replace(BASE, max_num_seqs=1)),
    "three at a time": (4, None, replace(BASE, max_num_seqs=3, max_num_batched_tokens=7)),
    "small pool, swap": (4, SMALL, replace(BASE, preemption=PreemptionMode.SWAP)),
    "small pool, recompute": (4, SMALL, replace(BASE, preemption=PreemptionMode.RECOMPUTE)),
    "small pool, no prefix index": (4, SMALL, replace(BASE, enable_prefix_caching=False)),
}


def requests() -> list[Request]:
    """Three groups of prompts with a common beginning, and some without; half of the rows draw."""
    stems = [tuple((i * 37 + n * 11) % VOCAB_SIZE for i in range(length)) for n, length in enumerate((9, 14, 0))]
    prompts = [stems[r % 3] + tuple((r * 13 + j * j) % VOCAB_SIZE for j in range(1 + r % 5)) for r in range(24)]
    samplings = [SamplingParams(logprobs=2) if r % 2 else SEEDED[r // 2 % len(SEEDED)] for r in range(24)]
    return requests_of(prompts, samplings, max_tokens=MAX_TOKENS)


@functools.cache
def runner_of(directory: Path, page_size: int, num_usable: int | None) -> ModelRunner:
    spec = ModelSpec(model="tiny", dtype="float32", max_model_len=MAX_MODEL_LEN)
    options = EngineOptions(page_size=page_size, pool_bytes=4 << 20, swap_bytes=1 << 20, num_threads=1)
    config = ModelRunnerConfig(model_dir=directory, spec=spec, options=options)
    if num_usable is None:
        return config.build()
    shape = runner_of(directory, page_size, None).pool
    pool_bytes = (num_usable + 1) * shape.page_size * shape.bytes_per_token
    return replace(config, options=replace(options, pool_bytes=pool_bytes)).build()


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp(request.param)
    save_tiny(request.param, directory)
    return directory


@functools.cache
def alone(directory: Path) -> Answers:
    """Every request by itself, whole prompt at once, in an engine that shares nothing."""
    limits = replace(BASE, max_num_seqs=1, enable_prefix_caching=False)
    return answer(runner_of(directory, 16, None), requests(), limits)


@pytest.mark.parametrize("policies", POLICIES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_answers_are_those_of_each_request_alone(model: Path, variant: str, policies: str) -> None:
    page_size, num_usable, limits = VARIANTS[variant]
    rules = POLICIES[policies]
    limits = replace(limits, order=rules.order, admission=rules.admission, eviction=rules.eviction)
    answers = answer(runner_of(model, page_size, num_usable), requests(), limits)
    assert answers.tokens == alone(model).tokens
    if variant.startswith("small pool") and policies == "arrival":
        assert answers.stats.preemptions > 0
        assert (answers.stats.preemptions_swap > 0) == (limits.preemption is not PreemptionMode.RECOMPUTE)


@pytest.mark.parametrize("threads", [2, 3])
def test_the_number_of_threads_changes_no_answer(model: Path, threads: int) -> None:
    expected, before = alone(model).tokens, torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert answer(runner_of(model, 4, None), requests(), BASE).tokens == expected
    finally:
        torch.set_num_threads(before)


def test_the_answers_are_worth_comparing(model: Path) -> None:
    answers = alone(model).tokens
    assert len({tuple(tokens) for tokens in answers}) > 20
    assert len({token for tokens in answers for token in tokens}) > VOCAB_SIZE // 3
