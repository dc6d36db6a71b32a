"""Rotary tables equal transformers', to the last bit where its own formula is the same, up to 100,000 positions."""

from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, Phi3Config
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from nightmill_worker.model.families import from_transformers
from nightmill_worker.model.rope import rope_table

POSITIONS = 100_000
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "default-large-theta": {"rope_type": "default", "rope_theta": 5_000_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn-all": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 0.707,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
    "yarn-clamped": {
        "rope_type": "yarn",
        "rope_theta": 100.0,
        "factor": 2.0,
        "original_max_position_embeddings": 500_000,
    },
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 16.0,
        "attention_factor": 1.5,
        "original_max_position_embeddings": 4096,
    },
}


def tables_of(module: Any, *args: Any, positions: int = POSITIONS) -> torch.Tensor:
    """transformers' cos and sin in our layout: it repeats each half."""
    cos, sin = module(torch.zeros(1, dtype=torch.float32), torch.arange(positions)[None], *args)
    half = cos.shape[-1] // 2
    assert torch.equal(cos[..., :half], cos[..., half:])
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)


@pytest.mark.parametrize("name", ROPES)
def test_llama_tables(name: str) -> None:
    hf = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=1,
        max_position_embeddings=131_072,
        rope_parameters=dict(ROPES[name]),
    )
    rope = from_transformers(hf).layers[0].rope
    assert rope is not None
    assert torch.equal(rope_table(rope, POSITIONS), tables_of(LlamaRotaryEmbedding(hf)))


def test_gemma3_has_one_table_for_local_and_one_for_global_layers() -> None:
    hf = Gemma3TextConfig(
        head_dim=64,
        num_hidden_layers=6,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        },
    )
    module = Gemma3RotaryEmbedding(hf)
    for kind, layer in zip(hf.layer_types, from_transformers(hf).layers, strict=True):
        assert layer.rope is not None
        assert torch.equal(rope_table(layer.rope, 20_000), tables_of(module, kind, positions=20_000))


def test_phi3_partial_and_longrope_tables() -> None:
    common: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 2, "num_hidden_layers": 1}
    partial = Phi3Config(**common, partial_rotary_factor=0.5)
    long = Phi3Config(
        **common,
        max_position_embeddings=131_072,
        original_max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0 + i / 10 for i in range(32)],
            "long_factor": [9.0] * 32,
            "original_max_position_embeddings": 4096,
        },
    )
    for hf in (partial, long):
        rope = from_transformers(hf).layers[0].rope
        assert rope is not None
        expected = tables_of(Phi3RotaryEmbedding(hf), positions=4096)
        torch.testing.assert_close(rope_table(rope, 4096), expected, rtol=0, atol=1e-6)
