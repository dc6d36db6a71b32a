"""Recorded steps give the bits that the same steps give operator by operator, or are not recorded at all."""

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.parity.engine_runs import SEEDED, answer, answer_preempted, requests_of
from tests.parity.paged_driver import DrivenSequence, PagedDriver, greedy_batch
from tests.unit.model.test_model_config import SMOLLM2

from nightmill.records import EngineOptions, ModelSpec
from nightmill_kernels.backend import active_isa, use_isa
from nightmill_kernels.linear import is_ours
from nightmill_worker.engine.options import LoopOptions, PreemptionMode
from nightmill_worker.engine.step import PrefixGroups
from nightmill_worker.model import runner as runner_module
from nightmill_worker.model.runner import ModelRunner, ModelRunnerConfig

TINY = SMOLLM2 | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 211,
    "max_position_embeddings": 256,
}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32, "attention_bias": False}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 24}
GRANITE = {
    "architectures": ["GraniteForCausalLM"],
    "model_type": "granite",
    "attention_multiplier": 0.25,
    "embedding_multiplier": 2.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
}
PROMPTS = [[(7 * i + j) % 211 for j in range(3 + 5 * i)] for i in range(9)]


def _build(
    tmp_path: Path, more: dict[str, Any], dtype: str = "bfloat16", quantization: str | None = None
) -> ModelRunner:
    (tmp_path / "config.json").write_text(json.dumps(TINY | more))
    spec = ModelSpec(model="tiny", dtype=dtype, load_format="dummy", quantization=quantization)
    options = EngineOptions(page_size=16, pool_bytes=1 << 22, device="cpu")
    runner = ModelRunnerConfig(model_dir=tmp_path, spec=spec, options=options).build()
    assert isinstance(runner, ModelRunner)
    return runner


def _recorded(runner: ModelRunner) -> int:
    assert runner.recordings is not None
    return runner.recordings.num_recorded


def _is_ours() -> bool:
    return is_ours(active_isa(), torch.bfloat16)


class _Pair:
    """A runner that records and one that does not, given the same plans; their pools hold the same pages."""

    def __init__(
        self, tmp_path: Path, family: dict[str, Any], dtype: str = "bfloat16", quantization: str | None = None
    ) -> None:
        self.recorded, self.plain = (_build(tmp_path, family, dtype, quantization) for _ in range(2))
        self.plain.recordings = None
        self.driver = PagedDriver(self.recorded)

    def check(self, work: list[tuple[DrivenSequence, int]], *, every_token: bool = False) -> None:
        """Run a step on both; every sequence that drew goes on with its greedy token."""
        plan = self.driver.plan(work, every_token=every_token)
        logits, expected = (runner.compute_logits(plan) for runner in (self.recorded, self.plain))
        assert torch.equal(logits, expected)
        for row, sequence in enumerate(plan.sample.sequence.tolist()):
            s = work[sequence][0]
            if s.num_computed == len(s.tokens):
                s.tokens.append(int(logits[row].argmax()))

    def check_random(self, rng: random.Random, *, steps: int, max_tokens: int) -> None:
        """Sequences come, are computed in pieces of any size beside others, decode, and go."""
        running: list[DrivenSequence] = []
        for _ in range(steps):
            for _ in range(rng.choice([0, 0, 1, 3])):
                running.append(self.driver.add([rng.randrange(211) for _ in range(rng.choice([1, 2, 17, 40, 90]))]))
            chosen = rng.sample(running, rng.randint(0, len(running)))
            work, left = [], max_tokens
            for s in chosen:
                ahead = len(s.tokens) - s.num_computed
                count = min(rng.choice([ahead, ahead, rng.randint(1, ahead)]), left)
                if count:
                    work.append((s, count))
                    left -= count
            if work:
                self.check(work, every_token=rng.random() < 0.1)
            for s in [s for s in running if len(s.tokens) > 120 or rng.random() < 0.05]:
                running.remove(s)
                self.driver.release(s)


@pytest.mark.parametrize(
    ("family", "dtype", "quantization"),
    [
        ({}, "bfloat16", None),
        ({}, "float32", None),
        (QWEN3, "bfloat16", None),
        (MISTRAL, "bfloat16", None),
        ({"tie_word_embeddings": False}, "bfloat16", None),
        ({}, "bfloat16", "int8"),
    ],
    ids=["llama", "float32", "qwen3", "window", "untied", "int8"],
)
def test_the_same_bits_as_operator_by_operator(
    family: dict[str, Any], dtype: str, quantization: str | None, tmp_path: Path
) -> None:
    pair = _Pair(tmp_path, family, dtype, quantization)
    pair.check_random(random.Random(1), steps=60, max_tokens=200)
    assert _recorded(pair.recorded) == (1 if is_ours(active_isa(), getattr(torch, dtype)) else 0)


@pytest.mark.parametrize("first", [1, 7, 64], ids=["one", "seven", "many"])
def test_whatever_step_was_recorded(first: int, tmp_path: Path) -> None:
    """Also one of one token: its tensors have strides that say nothing of rows further on."""
    pair = _Pair(tmp_path, {})
    pair.check([(pair.driver.add([3] * first), first)])
    assert _recorded(pair.recorded) == (1 if _is_ours() else 0)
    pair.check_random(random.Random(first), steps=20, max_tokens=300)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32), st.integers(1, 300))
def test_any_steps_one_after_another(tmp_path: Path, seed: int, max_tokens: int) -> None:
    pair = _shared_pair(tmp_path)
    pair.check_random(random.Random(seed), steps=8, max_tokens=max_tokens)


_PAIRS: list[_Pair] = []


def _shared_pair(tmp_path: Path) -> _Pair:
    if not _PAIRS:
        _PAIRS.append(_Pair(tmp_path, {}))
    pair = _PAIRS[0]
    pair.driver = PagedDriver(pair.recorded)  # all pages are free again
    return pair


def test_a_first_step_that_draws_nothing_records_nothing(tmp_path: Path) -> None:
    pair = _Pair(tmp_path, {})
    s, other = pair.driver.add(list(range(40))), pair.driver.add([1, 2, 3])
    pair.check([(s, 20)])
    assert _recorded(pair.recorded) == 0
    pair.check([(other, 3)])
    pair.check([(s, 7)])
    pair.check([(s, 13), (other, 1)])
    assert _recorded(pair.recorded) == (1 if _is_ours() else 0)


def test_draws_that_are_not_last_tokens_are_right(tmp_path: Path) -> None:
    pair = _Pair(tmp_path, {})
    sequences = [pair.driver.add(list(range(9))) for _ in range(2)]
    pair.check([(pair.driver.add([5]), 1)])  # so that there is a recording
    plan = pair.driver.plan([(s, 9) for s in sequences], every_token=True)
    whole = pair.recorded.compute_logits(plan)
    for rows in ([(0, 3, 4), (1, 17, 9)], [(1, 17, 9), (0, 8, 9)], [(0, 7, 8), (0, 8, 9)]):
        batch = greedy_batch(rows)
        logits = pair.recorded.compute_logits(replace(plan, sample=batch))
        assert torch.equal(logits, whole[batch.token_index])


def test_groups_come_and_go_between_replays(tmp_path: Path) -> None:
    runner = _build(tmp_path, {})
    driver = PagedDriver(runner)
    sequences = [driver.add([(3 * j) % 211 for j in range(40)]) for _ in range(4)]
    newcomer = driver.add(list(range(30)))
    runner.run(driver.plan([(s, 40) for s in sequences]))
    for s in sequences:
        s.tokens.append(5)
    plan = driver.plan([*((s, 1) for s in sequences), (newcomer, 20)])
    tables = plan.page_tables.copy()
    tables[:4, :2] = tables[0, :2]  # 32 tokens of the same prompt: any of the copies will do
    apart, plan = plan, replace(plan, page_tables=tables)
    expected = runner.compute_logits(apart)
    groups = PrefixGroups(
        starts=np.array([0, 4], np.int32), sequences=np.arange(4, dtype=np.int32), num_pages=np.array([2], np.int32)
    )
    alone = runner.compute_logits(plan)
    silent = greedy_batch([(0, 0, 41), (3, 3, 41)])  # members that draw nothing are in no group of the last layer
    for _ in range(2):
        assert torch.equal(runner.compute_logits(replace(plan, groups=groups)), alone)
        assert torch.equal(runner.compute_logits(apart), expected)  # what a group of the step before would refuse
        assert torch.equal(runner.compute_logits(replace(plan, groups=groups, sample=silent)), alone[[0, 3]])
    wrong = replace(groups, sequences=np.zeros(4, np.int32))
    with pytest.raises(ValueError, match="prefix group"):
        runner.compute_logits(replace(plan, groups=wrong))


@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
def test_the_same_answers_through_the_engine_with_preemption(mode: PreemptionMode, tmp_path: Path) -> None:
    recorded, plain = (_build(tmp_path, {}) for _ in range(2))
    plain.recordings = None
    limits = LoopOptions(max_model_len=192, max_num_seqs=8, max_num_batched_tokens=48)
    stem = tuple(range(64))
    prompts = [(stem if r % 3 else ()) + tuple((r * 13 + j) % 211 for j in range(1 + 4 * r)) for r in range(12)]
    requests = requests_of(prompts, SEEDED, max_tokens=9)
    expected = answer(plain, requests, limits)
    assert answer(recorded, requests, limits).tokens == expected.tokens
    assert answer_preempted(recorded, requests, limits, mode, lambda step: step % 4 == 0).tokens == expected.tokens


def test_logits_take_no_more_room_than_steps_have_drawn(tmp_path: Path) -> None:
    pair = _Pair(tmp_path, {})
    recordings = pair.recorded.recordings
    assert recordings is not None
    sequences = [pair.driver.add([7, r]) for r in range(9)]
    for count, room in ((2, 2), (1, 2), (5, 8), (9, 16), (3, 16)):
        for s in sequences[:count]:
            s.tokens = s.tokens[: s.num_computed + 1] if s.num_computed else s.tokens
        pair.check([(s, len(s.tokens) - s.num_computed) for s in sequences[:count]])
        assert recordings.num_logit_rows == room


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_model_that_needs_more_than_the_library_is_not_recorded(quantization: str | None, tmp_path: Path) -> None:
    """Granite scales with torch."""
    runner, plain = (_build(tmp_path, GRANITE, quantization=quantization) for _ in range(2))
    plain.recordings = None
    assert PagedDriver(runner).generate(PROMPTS, max_tokens=6) == PagedDriver(plain).generate(PROMPTS, max_tokens=6)
    assert _recorded(runner) == 0


def test_each_instruction_set_and_thread_count_has_its_own(tmp_path: Path) -> None:
    runner = _build(tmp_path, {})
    driver = PagedDriver(runner)
    sequence = driver.add([1, 2, 3])
    runner.run(driver.plan([(sequence, 3)]))
    sequence.tokens.append(4)
    plan = driver.plan([(sequence, 1)])
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for _ in range(2):
                runner.run(plan)
    finally:
        torch.set_num_threads(threads)
    with use_isa("reference"):
        runner.run(plan)
    assert _recorded(runner) == (2 if _is_ours() else 0)


def test_large_steps_find_no_buffers_and_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "MAX_STEP_TOKENS", 4)
    small = _build(tmp_path, {})
    monkeypatch.undo()
    usual = _build(tmp_path, {})
    answers = [PagedDriver(runner).generate(PROMPTS, max_tokens=5) for runner in (small, usual)]
    assert answers[0] == answers[1]


_FIRST_STEP = """
import json, sys
from pathlib import Path
from nightmill.records import EngineOptions, ModelSpec
from nightmill_kernels.backend import active_isa
from nightmill_kernels.linear import is_ours
from nightmill_worker.model.runner import ModelRunnerConfig
import torch
from tests.parity.paged_driver import PagedDriver
spec = ModelSpec(model="tiny", dtype="bfloat16", load_format="dummy")
options = EngineOptions(page_size=16, pool_bytes=1 << 22, device="cpu")
runner = ModelRunnerConfig(model_dir=Path(sys.argv[1]), spec=spec, options=options).build()
PagedDriver(runner).generate([[1, 2, 3]], max_tokens=3)
print(runner.recordings.num_recorded == is_ours(active_isa(), torch.bfloat16), "torch._dynamo" in sys.modules)
"""


def test_recording_does_not_load_torchs_compiler(tmp_path: Path) -> None:
    """It takes 1.4 s and 100 MB, in the first decode step of every engine."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    command = [sys.executable, "-c", _FIRST_STEP, str(tmp_path)]
    output = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=True)
    assert output.stdout.split() == ["True", "False"]
