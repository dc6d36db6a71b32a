"""Reading configs: what is supported, what is refused and in which words, and the figures derived."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from nightmill.errors import ModelError
from nightmill_worker.model.config import ModelConfig
from nightmill_worker.model.families import FAMILIES, from_transformers

SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 0,
}


def write(directory: Path, config: dict[str, Any], generation: Any = None) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def test_reads_a_model_directory(tmp_path: Path) -> None:
    config = ModelConfig.from_directory(write(tmp_path, SMOLLM2, {"eos_token_id": [0, 2]}))
    assert (config.num_layers, config.head_dim, config.num_qkv_rows) == (30, 64, 960)
    assert config.layers[0].rope is not None
    assert config.layers[0].rope.theta == 100_000
    assert config.eos_token_ids == (0, 2)
    assert config.file_dtype == "bfloat16"
    assert config.kv_bytes_per_token("bfloat16") == 23_040
    assert config.kv_bytes_per_token("float32") == 46_080
    assert config.tie_embeddings


@pytest.mark.parametrize("generation", [{}, {"eos_token_id": None}, {"eos_token_id": 0}])
def test_generation_config_may_add_no_eos(tmp_path: Path, generation: Any) -> None:
    assert ModelConfig.from_directory(write(tmp_path, SMOLLM2, generation)).eos_token_ids == (0,)


def test_max_model_len_is_at_most_the_models_positions(tmp_path: Path) -> None:
    config = ModelConfig.from_directory(write(tmp_path, SMOLLM2))
    assert config.resolve_max_model_len(None) == 8192
    assert config.resolve_max_model_len(100) == 100
    for bad in (8193, 0, -1):
        with pytest.raises(ModelError, match="8192 positions"):
            config.resolve_max_model_len(bad)


def test_yarn_reaches_beyond_the_stated_positions(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
    assert ModelConfig.from_directory(write(tmp_path, SMOLLM2 | {"rope_scaling": rope})).max_position == 32_768


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotations_that_change_with_length_stop_at_the_original_length(tmp_path: Path, kind: str) -> None:
    factors = {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32} if kind == "longrope" else {}
    rope = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 2048, **factors}
    config = ModelConfig.from_directory(write(tmp_path, SMOLLM2 | {"rope_scaling": rope}))
    limit = 2048 if kind == "longrope" else 8192
    assert config.resolve_max_model_len(None) == limit
    with pytest.raises(ModelError):
        config.resolve_max_model_len(limit + 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, "GPT2LMHeadModel is not supported"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification is not supported"),
        ({"model_type": "no-such-model"}, "cannot be read as a model config"),
        ({"hidden_act": "relu"}, "activation 'relu'"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "stored quantised"),
        ({"num_key_value_heads": 2}, "cannot share"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        ModelConfig.from_directory(write(tmp_path, SMOLLM2 | changes))
    if "Llama" in message or "GPT2" in message:
        assert caught.value.hint is not None
        assert "Qwen3ForCausalLM" in caught.value.hint


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        ModelConfig.from_directory(tmp_path)


def test_every_family_is_a_class_of_transformers() -> None:
    assert [name for name in FAMILIES if not hasattr(transformers, name)] == []


def test_families_differ_where_they_should() -> None:
    def read(name: str, **changes: Any) -> ModelConfig:
        return from_transformers(getattr(transformers, name)(**changes))

    assert read("Qwen2Config").qkv_bias
    assert not read("Qwen2Config").out_bias
    assert read("Qwen3Config", hidden_size=1024, num_attention_heads=16, num_key_value_heads=8).head_dim == 128
    assert [layer.window for layer in read("Gemma2Config").layers[:2]] == [4096, None]
    assert read("MistralConfig").layers[0].window == 4096
    assert [layer.rope is None for layer in read("SmolLM3Config").layers[:4]] == [False, False, False, True]
    assert read("GemmaConfig", hidden_act="gelu").activation == "gelu_tanh"
    local, full = read("Gemma3TextConfig").layers[0].rope, read("Gemma3TextConfig").layers[5].rope
    assert local is not None
    assert full is not None
    assert (local.theta, full.theta) == (10_000, 1_000_000)
