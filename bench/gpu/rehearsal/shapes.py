"""The models that are rehearsed: real shapes of every family, cut to as many layers as it has kinds of them."""

import json
from pathlib import Path
from typing import Any

from nightmill_worker.model.config import ModelConfig
from nightmill_worker.model.config_reader import read_config

_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _shape(
    family: str, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int, layers: int = 2, **more: Any
) -> dict[str, Any]:
    return {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": family.lower(),
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "num_hidden_layers": layers,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        **more,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _shape("Qwen3", 1024, 3072, 16, 8, 151936, head_dim=128, tie_word_embeddings=True),
    "llama-3.1-8b": _shape("Llama", 4096, 14336, 32, 8, 128256, rope_scaling=_LLAMA3),
    "llama-3.2-1b": _shape("Llama", 2048, 8192, 32, 8, 128256, rope_scaling=_LLAMA3, tie_word_embeddings=True),
    "smollm2-135m": _shape("Llama", 576, 1536, 9, 3, 49152, tie_word_embeddings=True),
    "qwen2.5-7b": _shape("Qwen2", 3584, 18944, 28, 4, 152064),
    "qwen3-8b": _shape("Qwen3", 4096, 12288, 32, 8, 151936, head_dim=128),
    "mistral-7b": _shape("Mistral", 4096, 14336, 32, 8, 32000, sliding_window=4096),
    "smollm3-3b": _shape("SmolLM3", 2048, 11008, 16, 4, 128256, no_rope_layers=[1, 1, 1, 0], layers=4),
    "gemma-2b": _shape(
        *("Gemma", 2048, 16384, 8, 1, 256000), head_dim=256, hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True
    ),
    "gemma-2-2b": _shape(
        "Gemma2",
        *(2304, 9216, 8, 4, 256000),
        head_dim=256,
        sliding_window=4096,
        query_pre_attn_scalar=256,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        hidden_activation="gelu_pytorch_tanh",
        tie_word_embeddings=True,
    ),
    "gemma-3-1b": _shape(
        "Gemma3",
        *(1152, 6912, 4, 1, 262144, 6),
        model_type="gemma3_text",
        head_dim=256,
        sliding_window=512,
        sliding_window_pattern=6,
        query_pre_attn_scalar=256,
        rope_local_base_freq=10000.0,
        hidden_activation="gelu_pytorch_tanh",
        tie_word_embeddings=True,
    ),
    "phi-3-mini": _shape("Phi3", 3072, 8192, 32, 32, 32064, sliding_window=2047),
    "olmo-2-7b": _shape("Olmo2", 4096, 11008, 32, 32, 100352),
    "granite-3-2b": _shape(
        "Granite",
        *(2048, 8192, 32, 8, 49155),
        embedding_multiplier=12.0,
        logits_scaling=8.0,
        residual_multiplier=0.22,
        attention_multiplier=0.015625,
        tie_word_embeddings=True,
    ),
}
"""config.json by model, from the published ones."""


def read_shape(name: str, scratch: Path) -> ModelConfig:
    """A model's config; `scratch`: a folder for its file."""
    (scratch / "config.json").write_text(json.dumps(SHAPES[name]))
    return read_config(scratch)
