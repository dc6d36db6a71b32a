"""The model's runner: building it, its pool, dtypes, and what a step gives back."""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.parity.paged_driver import PagedDriver
from tests.unit.model.test_model_config import SMOLLM2

from nightmill.errors import ModelError
from nightmill.records import EngineOptions, ModelSpec
from nightmill_worker.engine.step import Runner
from nightmill_worker.model import dtype as dtype_module
from nightmill_worker.model.config import ModelConfig
from nightmill_worker.model.dtype import resolve_dtype
from nightmill_worker.model.pool import KVPool, plan_pool
from nightmill_worker.model.runner import ModelRunnerConfig

TINY = SMOLLM2 | {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "vocab_size": 61,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,  # tied, a random model repeats its last token whatever its layers do
}


@pytest.fixture
def config(tmp_path: Path) -> ModelRunnerConfig:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return ModelRunnerConfig(
        model_dir=tmp_path,
        spec=ModelSpec(model="tiny", dtype="float32", load_format="dummy"),
        options=EngineOptions(page_size=4, pool_bytes=1 << 20),
    )


def test_config_is_picklable_and_builds_a_runner(config: ModelRunnerConfig) -> None:
    runner: Runner = pickle.loads(pickle.dumps(config)).build()
    assert runner.vocab_size == 61
    assert runner.pool.bytes_per_token == 2 * 2 * 1 * 8 * 4
    assert runner.pool.num_pages == (1 << 20) // (4 * runner.pool.bytes_per_token)
    runner.close()


def test_a_chunk_that_is_not_final_draws_nothing(config: ModelRunnerConfig) -> None:
    driver = PagedDriver(config.build())
    sequence = driver.add([5, 6, 7, 8, 9])
    assert driver.runner.run(driver.plan([(sequence, 3)])).tokens.tolist() == []
    assert len(driver.runner.run(driver.plan([(sequence, 2)])).tokens) == 1


def test_generates_the_same_from_the_same_seed(config: ModelRunnerConfig) -> None:
    prompts = [[1, 2, 3], [4]]
    first, again = (PagedDriver(config.build()).generate(prompts, max_tokens=8) for _ in range(2))
    other = PagedDriver(replace(config, dummy_seed=9).build()).generate(prompts, max_tokens=8)
    assert first == again != other


def test_padding_tokens_and_sequences_change_nothing(config: ModelRunnerConfig) -> None:
    runner = config.build()
    driver = PagedDriver(runner)
    plan = driver.plan([(driver.add([5, 6, 7]), 3)])
    expected = runner.compute_logits(plan)
    padded = replace(
        plan,
        token_ids=np.append(plan.token_ids, np.int32(0)),
        positions=np.append(plan.positions, np.int32(0)),
        slots=np.append(plan.slots, np.int64(-1)),
        query_starts=np.append(plan.query_starts, np.int32(4)),
        context_lens=np.append(plan.context_lens, np.int32(0)),
        page_tables=np.vstack([plan.page_tables, np.zeros_like(plan.page_tables)]),
    )
    torch.testing.assert_close(runner.compute_logits(padded), expected, rtol=0, atol=1e-6)


def test_read_only_and_reused_arrays_are_accepted(config: ModelRunnerConfig) -> None:
    driver = PagedDriver(config.build())
    plan = driver.plan([(driver.add([5, 6, 7]), 3)])
    expected = driver.runner.run(plan).tokens
    plan.token_ids.setflags(write=False)
    again = driver.runner.run(plan).tokens
    assert again.tolist() == expected.tolist()


def test_a_closed_runner_says_so(config: ModelRunnerConfig) -> None:
    driver = PagedDriver(config.build())
    driver.runner.close()
    with pytest.raises(RuntimeError, match="closed"):
        driver.runner.run(driver.plan([(driver.add([1]), 1)]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"quantization": "int3"}, "int3"), ({"load_format": "pickle"}, "pickle"), ({"dtype": "int4"}, "int4")],
)
def test_unknown_choices_are_refused(config: ModelRunnerConfig, changes: dict[str, str], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        replace(config, spec=replace(config.spec, **changes)).build()


def test_a_pool_too_small_for_one_sequence_is_refused(config: ModelRunnerConfig) -> None:
    options = replace(config.options, pool_bytes=16 << 10)  # 16 KiB: 31 usable pages of 4 tokens
    with pytest.raises(ModelError, match="holds 124 tokens; one sequence of 128 tokens"):
        replace(config, options=options).build()
    spec = replace(config.spec, max_model_len=124)
    assert replace(config, options=options, spec=spec).build().pool.num_pages == 32


def test_pool_is_sized_by_memory_and_zeroed(config: ModelRunnerConfig) -> None:
    model = ModelConfig.from_directory(config.model_dir)
    shape = plan_pool(model, EngineOptions(), dtype="bfloat16", max_model_len=128)
    assert shape.page_size == 16
    assert 0 < shape.num_pages * shape.page_size * shape.bytes_per_token <= 4 << 30
    small = replace(shape, num_pages=5)
    k, v = KVPool(model, small, torch.bfloat16).layer(1)
    assert k.shape == v.shape == (5, 1, 16, 8)
    assert not k.any()
    assert not v.any()


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16", "bfloat16"),
        ("flags\t\t: fpu amx_bf16", "bfloat16"),
        ("Features\t: fp asimd bf16", "bfloat16"),
        ("flags\t\t: fpu avx2 avx512f", "float32"),
        ("", "float32"),
    ],
)
def test_auto_dtype_follows_the_processor(
    cpuinfo: str, expected: str, config: ModelRunnerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(cpuinfo + "\n")
    monkeypatch.setattr(dtype_module, "_CPUINFO", path)
    assert resolve_dtype("auto", ModelConfig.from_directory(config.model_dir)) == expected
    monkeypatch.setattr(dtype_module, "_CPUINFO", tmp_path / "absent")
    assert resolve_dtype("auto", ModelConfig.from_directory(config.model_dir)) == "float32"
