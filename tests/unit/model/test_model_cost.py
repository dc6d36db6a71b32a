"""What a loaded model is said to cost, and what the device it runs on is said to do."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.unit.model.test_model_config import SMOLLM2

from nightmill.records import EngineOptions, ModelSpec
from nightmill_worker.engine.roofline import FULL, HasRoofline, Work
from nightmill_worker.model import roofline as roofline_module
from nightmill_worker.model.config import ModelConfig
from nightmill_worker.model.roofline import measure_ceilings, model_cost
from nightmill_worker.model.runner import ModelRunnerConfig
from nightmill_worker.simulate.cost_model import DEVICES, MODELS, CostModel

CPU = torch.device("cpu")


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    return ModelConfig.from_directory(tmp_path)


def test_a_model_costs_what_the_simulator_says(config: ModelConfig) -> None:
    cost, shape = model_cost(config, "bfloat16"), MODELS["smollm2-135m"]
    assert cost.weight_bytes == shape.step_weight_bytes
    assert cost.kv_bytes == shape.kv_bytes_per_token
    assert cost.windows == FULL
    work = Work(tokens=256, logit_rows=200, attended=9_000, context_read=8_000)
    roofline = roofline_module.Roofline(
        cost, roofline_module.Ceilings(DEVICES["cpu"].flops, DEVICES["cpu"].bytes_per_s)
    )
    assert roofline.seconds(work) == CostModel(DEVICES["cpu"], shape).seconds(work, 1)


def test_wider_elements_cost_bytes_only(config: ModelConfig) -> None:
    narrow, wide = model_cost(config, "bfloat16"), model_cost(config, "float32")
    assert (wide.weight_bytes, wide.kv_bytes) == (2 * narrow.weight_bytes, 2 * narrow.kv_bytes)
    assert wide.token_flops == narrow.token_flops


def test_int8_layers_cost_half_the_bytes_and_the_head_what_it_did(config: ModelConfig) -> None:
    plain, quantized = model_cost(config, "bfloat16"), model_cost(config, "bfloat16", "int8")
    head = 2 * config.vocab_size * config.hidden_size
    assert quantized.weight_bytes - head == (plain.weight_bytes - head) / 2
    assert (quantized.kv_bytes, quantized.token_flops) == (plain.kv_bytes, plain.token_flops)


def test_windows_count_by_their_share_of_the_layers(config: ModelConfig) -> None:
    layers = tuple(replace(layer, window=None if i % 6 == 5 else 512) for i, layer in enumerate(config.layers))
    assert dict(model_cost(replace(config, layers=layers), "bfloat16").windows) == pytest.approx(
        {512: 5 / 6, None: 1 / 6}
    )


def test_a_device_is_measured_once_per_dtype_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    roofline_module._measure.cache_clear()
    calls: list[tuple[torch.dtype, str | None]] = []
    measure = roofline_module._measure_cpu
    monkeypatch.setattr(roofline_module, "_measure_cpu", lambda *what: calls.append(what) or measure(*what))
    first = measure_ceilings(CPU, torch.float32)
    assert measure_ceilings(CPU, torch.float32) is first
    assert measure_ceilings(CPU, torch.bfloat16) is not first
    assert measure_ceilings(CPU, torch.float32, "int8") is not first
    assert calls == [(torch.float32, None), (torch.bfloat16, None), (torch.float32, "int8")]
    # Within what computers have been built to do.
    assert 1e8 < first.flops < 1e17
    assert 1e8 < first.bytes_per_s < 1e14


def test_a_built_runner_has_its_roofline(config: ModelConfig, tmp_path: Path) -> None:
    small = SMOLLM2 | {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 61}
    small |= {"num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(small))
    spec = ModelSpec(model="tiny", dtype="float32", load_format="dummy")
    options = EngineOptions(device="cpu", page_size=4, pool_bytes=1 << 20)
    runner = ModelRunnerConfig(model_dir=tmp_path, spec=spec, options=options).build()
    assert isinstance(runner, HasRoofline)
    assert runner.roofline is not None
    assert runner.roofline.cost.kv_bytes == runner.pool.bytes_per_token
    assert runner.roofline.ceilings is measure_ceilings(CPU, torch.float32)
    runner.close()
