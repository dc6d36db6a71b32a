"""`--quantization int8` in the model: what becomes int8, what does not, and where it is refused."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.parity.paged_driver import PagedDriver
from tests.unit.model.test_runner import TINY

from nightmill.errors import ModelError
from nightmill.records import EngineOptions, ModelSpec
from nightmill_kernels.gated_mul import Gate
from nightmill_kernels.linear_int8 import Int8Weight, linear_int8, quantize_weight
from nightmill_worker.model import linear_int8 as linear_int8_module
from nightmill_worker.model import runner as runner_module
from nightmill_worker.model.linear_int8 import Int8Linear
from nightmill_worker.model.runner import ModelRunner, ModelRunnerConfig

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [4], [9, 8, 7], [30, 31, 32, 33, 34, 35, 36, 37, 38, 39]]


@pytest.fixture(params=["float32", "bfloat16"])
def config(tmp_path: Path, request: pytest.FixtureRequest) -> ModelRunnerConfig:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return ModelRunnerConfig(
        model_dir=tmp_path,
        spec=ModelSpec(model="tiny", dtype=request.param, load_format="dummy", quantization="int8"),
        options=EngineOptions(device="cpu", page_size=4, pool_bytes=1 << 20),
    )


def logits(config: ModelRunnerConfig, prompts: Sequence[Sequence[int]] = PROMPTS) -> torch.Tensor:
    driver = PagedDriver(config.build())
    assert isinstance(driver.runner, ModelRunner)
    work = [(driver.add(prompt), len(prompt)) for prompt in prompts]
    return driver.runner.compute_logits(driver.plan(work, every_token=True))


def test_logits_are_near_those_without_and_not_the_same(config: ModelRunnerConfig) -> None:
    quantized, plain = logits(config), logits(replace(config, spec=replace(config.spec, quantization=None)))
    error = (quantized - plain).norm(dim=1) / plain.norm(dim=1)
    assert 1e-4 < error.max() < 0.05


def test_answers_do_not_depend_on_chunks_and_batch_mates(config: ModelRunnerConfig) -> None:
    together = PagedDriver(config.build()).generate(PROMPTS, max_tokens=10)
    chunked = PagedDriver(config.build()).generate(PROMPTS, max_tokens=10, chunk=2)
    alone = [PagedDriver(config.build()).generate([prompt], max_tokens=10)[0] for prompt in PROMPTS]
    assert together == chunked == alone


def test_logits_of_a_prompt_have_the_same_bits_in_any_company(config: ModelRunnerConfig) -> None:
    together = logits(config)
    first = 0
    for prompt in PROMPTS:
        assert torch.equal(logits(config, [prompt]), together[first : first + len(prompt)])
        first += len(prompt)


def test_the_layers_are_quantised_and_nothing_else(config: ModelRunnerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []

    def spy(weight: torch.Tensor, bias: torch.Tensor | None, gate: Gate | None) -> Int8Weight:
        shapes.append((tuple(weight.shape), weight.dtype))
        return quantize_weight(weight, bias, gate)

    monkeypatch.setattr(runner_module, "model_roofline", lambda *_: None)  # it makes a layer, too
    monkeypatch.setattr(linear_int8_module, "quantize_weight", spy)
    config.build()
    of_a_layer = [(40, 24), (24, 24), (64, 24), (24, 32)]
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.spec.dtype]
    assert sorted(shapes) == sorted((shape, dtype) for shape in of_a_layer * 2)


def test_a_layer_writes_where_it_is_told_to() -> None:
    torch.manual_seed(0)
    x, weight, bias, out = torch.randn(3, 40), torch.randn(70, 40), torch.randn(70), torch.zeros(3, 70)
    layer = Int8Linear(weight, bias)
    assert layer(x, out) is out
    assert torch.equal(out, layer(x))
    assert torch.equal(out, linear_int8(x, quantize_weight(weight, bias)))


@pytest.mark.parametrize("name", ["int4", "fp8", ""])
def test_an_unknown_name_is_refused(config: ModelRunnerConfig, name: str) -> None:
    with pytest.raises(ModelError, match=f"quantization '{name}' is not supported") as refused:
        replace(config, spec=replace(config.spec, quantization=name)).build()
    assert "int8" in str(refused.value.hint)


def test_on_a_gpu_it_is_refused_before_anything_is_loaded(
    config: ModelRunnerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimpleNamespace(torch_device=torch.device("cuda"), capability=(9, 0))
    monkeypatch.setattr(runner_module, "open_device", lambda _: device)
    monkeypatch.setattr(ModelRunnerConfig, "_build_on", lambda *_: pytest.fail("it was loaded"))
    with pytest.raises(ModelError, match="runs on CPUs only") as refused:
        config.build()
    assert "--device cpu" in str(refused.value.hint)


def test_a_checkpoint_that_is_quantised_already_stays_refused(config: ModelRunnerConfig) -> None:
    stored = TINY | {"quantization_config": {"quant_method": "gptq", "bits": 8}}
    (config.model_dir / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ModelError, match="stored quantised"):
        config.build()
