"""Recorded decode steps give the bits that the same steps give operator by operator, or are not recorded at all."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.parity.paged_driver import PagedDriver
from tests.unit.model.test_model_config import SMOLLM2

from nightmill.records import EngineOptions, ModelSpec
from nightmill_kernels.backend import active_isa, use_isa
from nightmill_kernels.linear import is_ours
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


@pytest.mark.parametrize(
    ("family", "quantization"),
    [({}, None), (QWEN3, None), ({"tie_word_embeddings": False}, None), ({}, "int8")],
    ids=["llama", "qwen3", "untied", "int8"],
)
def test_the_same_bits_as_operator_by_operator(
    family: dict[str, Any], quantization: str | None, tmp_path: Path
) -> None:
    recorded, plain = (_build(tmp_path, family, quantization=quantization) for _ in range(2))
    plain.recordings = None
    drivers = [PagedDriver(runner) for runner in (recorded, plain)]
    rows = [[driver.add(prompt) for prompt in PROMPTS] for driver in drivers]
    for driver, sequences in zip(drivers, rows, strict=True):
        driver.runner.run(driver.plan([(s, len(s.tokens)) for s in sequences]))
        for s in sequences:
            s.tokens.append(5)
    for step in range(24):
        width = 1 + step % len(PROMPTS)  # batches grow and shrink: recordings of different sizes share their places
        plans = [d.plan([(s, 1) for s in sequences[:width]]) for d, sequences in zip(drivers, rows, strict=True)]
        logits = [runner.compute_logits(p) for runner, p in zip((recorded, plain), plans, strict=True)]
        assert torch.equal(*logits)
        for sequences in rows:
            for s, token in zip(sequences[:width], logits[0].argmax(dim=-1).tolist(), strict=True):
                s.tokens.append(token)
    assert _recorded(recorded) == (len(PROMPTS) if is_ours(active_isa(), torch.bfloat16) else 0)


def test_groups_come_and_go_between_replays(tmp_path: Path) -> None:
    runner = _build(tmp_path, {})
    driver = PagedDriver(runner)
    sequences = [driver.add([(3 * j) % 211 for j in range(40)]) for _ in range(4)]
    runner.run(driver.plan([(s, 40) for s in sequences]))
    for s in sequences:
        s.tokens.append(5)
    plan = driver.plan([(s, 1) for s in sequences])
    tables = plan.page_tables.copy()
    tables[:, :2] = tables[0, :2]  # 32 tokens of the same prompt: any of the copies will do
    apart, plan = plan, replace(plan, page_tables=tables)
    expected = runner.compute_logits(apart)
    groups = PrefixGroups(
        starts=np.array([0, 4], np.int32), sequences=np.arange(4, dtype=np.int32), num_pages=np.array([2], np.int32)
    )
    alone = runner.compute_logits(plan)
    for _ in range(2):
        assert torch.equal(runner.compute_logits(replace(plan, groups=groups)), alone)
        assert torch.equal(runner.compute_logits(apart), expected)  # what a group of the step before would refuse
    wrong = replace(groups, sequences=np.zeros(4, np.int32))
    with pytest.raises(ValueError, match="prefix group"):
        runner.compute_logits(replace(plan, groups=wrong))


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
    assert _recorded(runner) == (2 if is_ours(active_isa(), torch.bfloat16) else 0)


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
