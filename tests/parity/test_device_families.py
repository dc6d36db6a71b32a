"""The device runner gives the plain runner's tokens for every kind of layer: windows, caps, norms, biases, no rope."""

from pathlib import Path

import numpy as np
import pytest
from tests.parity.engine_runs import SEEDED, answer, requests_of
from tests.parity.tiny_models import TINY, save_tiny

from nightmill.records import EngineOptions, ModelSpec
from nightmill.sampling import SamplingParams
from nightmill_worker.engine.options import LoopOptions
from nightmill_worker.model.config_reader import read_config
from nightmill_worker.model.device import Device
from nightmill_worker.model.device_choice import resolve_limits
from nightmill_worker.model.device_start import start_on_device
from nightmill_worker.model.runner import ModelRunnerConfig
from nightmill_worker.model.weights import load_weights

KINDS = ("llama-bias-tied", "mistral-window", "qwen3", "smollm3-window", "gemma2", "gemma3", "olmo2", "granite", "phi3")
SIZES = EngineOptions(device="cpu", page_size=4, pool_bytes=2 << 20, swap_bytes=0, max_num_seqs=7)


@pytest.mark.parametrize("name", KINDS)
def test_tokens_are_those_of_the_plain_runner(name: str, tmp_path: Path) -> None:
    assert name in TINY
    save_tiny(name, tmp_path)
    config = read_config(tmp_path)
    device = start_on_device(
        config,
        Device(),
        SIZES,
        resolve_limits(SIZES),
        lambda dtype, where: load_weights(tmp_path, config, dtype, where),
        dtype="float32",
        max_model_len=64,
    )
    spec = ModelSpec(model=name, dtype="float32", max_model_len=64)
    plain = ModelRunnerConfig(model_dir=tmp_path, spec=spec, options=SIZES).build()
    random = np.random.default_rng(1)
    prompts = [tuple(random.integers(3, 131, random.integers(1, 40)).tolist()) for _ in range(10)]
    requests = requests_of(prompts, (SamplingParams(temperature=0.0), *SEEDED), max_tokens=10)
    options = LoopOptions(max_num_seqs=7, max_num_batched_tokens=24, max_model_len=64)
    assert answer(device, requests, options).tokens == answer(plain, requests, options).tokens
    assert device.device.traffic.replays > 5
