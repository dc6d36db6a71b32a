"""Preempted at every step index, by swap and by recompute, with shared attention and without: the same answers.

Tiny float32 models with rows that share 144 tokens, enough for the engine to group them; half of the rows draw.
"""

import functools
from dataclasses import replace
from pathlib import Path

import pytest
from tests.parity.engine_runs import POLICIES, SEEDED, Answers, answer, answer_preempted, requests_of
from tests.parity.tiny_models import save_tiny

from nightmill.records import EngineOptions, ModelSpec
from nightmill.sampling import SamplingParams
from nightmill_worker.engine.options import LoopOptions, PreemptionMode
from nightmill_worker.engine.request import Request
from nightmill_worker.model.runner import ModelRunner, ModelRunnerConfig

MAX_MODEL_LEN = 192
MAX_TOKENS = 8
NUM_STEPS = 11  # of an undisturbed run; checked below
LIMITS = LoopOptions(max_model_len=MAX_MODEL_LEN, max_num_seqs=16, max_num_batched_tokens=64)


def requests() -> list[Request]:
    stem = tuple((i * 37 + 5) % 131 for i in range(144))
    prompts = [(stem if r % 4 else ()) + tuple((r * 13 + j * j) % 131 for j in range(1 + r % 5)) for r in range(16)]
    samplings = [SamplingParams(logprobs=2) if r % 2 else SEEDED[r // 2 % len(SEEDED)] for r in range(16)]
    return requests_of(prompts, samplings, max_tokens=MAX_TOKENS)


# Heads of 8 run on the torch reference, of 16 in C.
@pytest.fixture(scope="module", params=["llama", "qwen3"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    directory: Path = tmp_path_factory.mktemp(request.param)
    save_tiny(request.param, directory)
    spec = ModelSpec(model="tiny", dtype="float32", max_model_len=MAX_MODEL_LEN)
    options = EngineOptions(page_size=16, pool_bytes=4 << 20, swap_bytes=4 << 20, num_threads=1)
    return ModelRunnerConfig(model_dir=directory, spec=spec, options=options).build()


@functools.cache
def undisturbed(runner: ModelRunner) -> Answers:
    return answer(runner, requests(), replace(LIMITS, enable_shared_attention=False))


@pytest.mark.parametrize("policies", POLICIES)
def test_shared_attention_changes_no_answer(runner: ModelRunner, policies: str) -> None:
    rules = POLICIES[policies]
    limits = replace(LIMITS, order=rules.order, admission=rules.admission, eviction=rules.eviction)
    answers = answer(runner, requests(), limits)
    assert answers.tokens == undisturbed(runner).tokens
    assert answers.stats.shared_attention_rows > 50
    assert answers.stats.steps == NUM_STEPS


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "unshared"])
@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
@pytest.mark.parametrize("at", range(1, NUM_STEPS))
def test_preempted_at_every_step(runner: ModelRunner, at: int, mode: PreemptionMode, shared: bool) -> None:
    limits = replace(LIMITS, enable_shared_attention=shared)
    answers = answer_preempted(runner, requests(), limits, mode, lambda step: step == at)
    assert answers.tokens == undisturbed(runner).tokens


@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
def test_preempted_again_and_again(runner: ModelRunner, mode: PreemptionMode) -> None:
    answers = answer_preempted(runner, requests(), LIMITS, mode, lambda step: step % 2 == 0)
    assert answers.tokens == undisturbed(runner).tokens
