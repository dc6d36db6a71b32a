"""The runners that the contract suite is run against, made alike: page size, pool, host pages, a token that fails."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from nightmill_worker.engine.fake import FakeRunnerConfig
from nightmill_worker.engine.step import PoolShape, Runner
from nightmill_worker.model.config import ModelConfig
from nightmill_worker.model.config_reader import read_config
from nightmill_worker.model.decoder import Decoder
from nightmill_worker.model.device import Device
from nightmill_worker.model.device_choice import StepLimits
from nightmill_worker.model.device_runner import DeviceRunner
from nightmill_worker.model.dummy import dummy_weights
from nightmill_worker.model.pool import KVPool
from nightmill_worker.model.runner import ModelRunner
from nightmill_worker.model.weights import ModelWeights

PAGE_SIZE = 4
NUM_PAGES = 64
NUM_HOST_PAGES = 16
_MAX_MODEL_LEN = 200
VOCAB_SIZE = 101
FAIL_TOKEN = 100
"""A sequence that has it in sight gets a row failure."""

_TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def fake_runner(_: Path, *, device_seed: int | None = None) -> Runner:
    """The engine tests' model without a model; `device_seed`: on a device that works behind the caller's back."""
    return FakeRunnerConfig(
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        vocab_size=VOCAB_SIZE,
        num_host_pages=NUM_HOST_PAGES,
        fail_token=FAIL_TOKEN,
        device_seed=device_seed,
    ).build()


def model_runner(directory: Path) -> Runner:
    """A tiny decoder in float32 whose logits depend on all it sees; FAIL_TOKEN's embedding is not a number."""
    config, weights, shape = tiny_model(directory)
    return ModelRunner(config, weights, shape, max_model_len=_MAX_MODEL_LEN, num_host_pages=NUM_HOST_PAGES)


def device_runner(
    directory: Path,
    *,
    enforce_eager: bool = False,
    device: Device | None = None,
    num_layers: int = 2,
    num_host_pages: int = NUM_HOST_PAGES,
) -> DeviceRunner:
    """The same, run as a GPU's steps are: staged, decodes by graph, drawn where the logits are."""
    config, weights, shape = tiny_model(directory, num_layers)
    pool = KVPool(config, shape, torch.float32)
    return DeviceRunner(
        config,
        Decoder(config, weights, pool, max_model_len=_MAX_MODEL_LEN),
        pool,
        device or Device(),
        dtype=torch.float32,
        max_model_len=_MAX_MODEL_LEN,
        limits=StepLimits(device="cpu", max_num_seqs=24, max_num_batched_tokens=256),
        num_host_pages=num_host_pages,
        enforce_eager=enforce_eager,
    )


def tiny_model(directory: Path, num_layers: int = 2) -> tuple[ModelConfig, ModelWeights, PoolShape]:
    """Its config, weights and page pool."""
    (directory / "config.json").write_text(json.dumps({**_TINY, "num_hidden_layers": num_layers}))
    config = read_config(directory)
    weights = dummy_weights(config, torch.float32, seed=3)
    generator = torch.Generator().manual_seed(5)
    for layer in weights.layers:  # larger than usual: attention then decides what is drawn
        for part in (layer.qkv, layer.out, layer.gate_up, layer.down):
            part.normal_(std=0.25, generator=generator)
    weights.lm_head.normal_(std=0.5, generator=generator)
    weights.embedding[FAIL_TOKEN] = float("nan")
    weights.lm_head[FAIL_TOKEN] = 0  # others are far above: it is not drawn unless asked for
    shape = PoolShape(num_pages=NUM_PAGES, page_size=PAGE_SIZE, bytes_per_token=config.kv_bytes_per_token("float32"))
    return config, weights, shape


SUBJECTS: dict[str, Callable[[Path], Runner]] = {
    "fake": fake_runner,
    "fake-device": partial(fake_runner, device_seed=7),
    "model": model_runner,
    "device": device_runner,
    "device-eager": partial(device_runner, enforce_eager=True),
}
