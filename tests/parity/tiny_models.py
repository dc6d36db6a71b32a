"""Tiny random models of every supported family, made and saved by transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

WINDOW = 7  # smaller than the sequences, and no multiple of a page
LENGTH = 40
_SMALL: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 2,
}


def _config(name: str, **changes: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, name)(**{**_SMALL, **changes})


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **parameters}


TINY: dict[str, Callable[[], Any]] = {
    "llama": _config("LlamaConfig"),
    "llama-bias-tied": _config("LlamaConfig", attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama-one-kv-head": _config("LlamaConfig", num_key_value_heads=1, head_dim=10),
    "llama-llama3-rope": _config(
        "LlamaConfig",
        rope_parameters=_rope(
            "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
        ),
    ),
    "llama-yarn": _config(
        "LlamaConfig", rope_parameters=_rope("yarn", factor=4.0, original_max_position_embeddings=64)
    ),
    "llama-linear-rope": _config("LlamaConfig", rope_parameters=_rope("linear", factor=2.0)),
    "llama-dynamic-rope": _config("LlamaConfig", rope_parameters=_rope("dynamic", factor=2.0)),
    "mistral-window": _config("MistralConfig", sliding_window=WINDOW),
    "mistral": _config("MistralConfig", sliding_window=None, head_dim=16),
    "qwen2": _config("Qwen2Config", tie_word_embeddings=True),
    "qwen2-window": _config("Qwen2Config", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2),
    "qwen3": _config("Qwen3Config", head_dim=16, tie_word_embeddings=True),
    "qwen3-bias": _config("Qwen3Config", head_dim=8, attention_bias=True),
    "smollm3": _config("SmolLM3Config", no_rope_layers=[1, 1, 0, 1]),
    "smollm3-window": _config(
        "SmolLM3Config", no_rope_layer_interval=2, use_sliding_window=True, sliding_window=WINDOW
    ),
    "gemma": _config("GemmaConfig", head_dim=16),
    "gemma2": _config(
        "Gemma2Config",
        head_dim=16,
        sliding_window=WINDOW,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
    ),
    "gemma3": _config(
        "Gemma3TextConfig",
        head_dim=16,
        num_hidden_layers=6,
        sliding_window=WINDOW,
        sliding_window_pattern=3,
        query_pre_attn_scalar=24,
        rope_parameters={
            "sliding_attention": _rope("default"),
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        },
    ),
    "phi3": _config("Phi3Config", sliding_window=WINDOW),
    "phi3-partial": _config("Phi3Config", partial_rotary_factor=0.5),
    "phi3-longrope": _config(
        "Phi3Config",
        max_position_embeddings=512,
        original_max_position_embeddings=64,
        rope_parameters=_rope(
            "longrope",
            short_factor=[1.0, 1.1, 1.3, 1.5],
            long_factor=[2.0, 3.0, 5.0, 9.0],
            original_max_position_embeddings=64,
        ),
    ),
    "olmo2": _config("Olmo2Config"),
    "granite": _config(
        "GraniteConfig",
        embedding_multiplier=7.0,
        logits_scaling=4.0,
        residual_multiplier=0.3,
        attention_multiplier=0.2,
        attention_bias=True,
    ),
}


def save_tiny(name: str, directory: Path, *, dtype: torch.dtype = torch.float32) -> Any:
    """Make a model with weights large enough that every part shows in the logits; save it and return it."""
    torch.manual_seed(sorted(TINY).index(name))
    model = transformers.AutoModelForCausalLM.from_config(TINY[name](), attn_implementation="eager", dtype=dtype)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.uniform_(-0.5, 0.5)
                if "gemma" not in name:
                    parameter.add_(1.0)
            elif key.endswith("bias"):
                parameter.uniform_(-0.5, 0.5)
            else:
                parameter.normal_(std=0.25)
    model.tie_weights()
    model.save_pretrained(directory)
    return model.eval()
