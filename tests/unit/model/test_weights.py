"""Loading weights: every tensor arrives, and a file that does not fit the config is refused by name."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from nightmill.errors import ModelError
from nightmill_worker.model.config import ModelConfig
from nightmill_worker.model.dummy import dummy_weights
from nightmill_worker.model.weights import allocate_weights, load_weights, named_destinations

FILE = "model.safetensors"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=40,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def rewrite(directory: Path, change: dict[str, torch.Tensor | None]) -> None:
    tensors = load_file(directory / FILE) | {k: v for k, v in change.items() if v is not None}
    for name in [k for k, v in change.items() if v is None]:
        del tensors[name]
    save_file(tensors, directory / FILE)


def test_fuses_projections(model: Path) -> None:
    config = ModelConfig.from_directory(model)
    stored = load_file(model / FILE)
    weights = load_weights(model, config, torch.float32)
    prefix = "model.layers.1."
    qkv = torch.cat([stored[f"{prefix}self_attn.{x}_proj.weight"] for x in "qkv"])
    gate_up = torch.cat([stored[f"{prefix}mlp.{x}_proj.weight"] for x in ("gate", "up")])
    assert torch.equal(weights.layers[1].qkv, qkv)
    assert torch.equal(weights.layers[1].gate_up, gate_up)
    assert torch.equal(weights.lm_head, stored["lm_head.weight"])
    assert not weights.is_tied


def test_converts_to_the_asked_dtype(model: Path) -> None:
    weights = load_weights(model, ModelConfig.from_directory(model), torch.bfloat16)
    assert weights.layers[0].down.dtype == torch.bfloat16
    assert torch.equal(weights.embedding, load_file(model / FILE)["model.embed_tokens.weight"].bfloat16())


def test_reads_several_files(model: Path) -> None:
    tensors = load_file(model / FILE)
    (model / FILE).unlink()
    names = sorted(tensors)
    index = {}
    for i, part in enumerate((names[:7], names[7:])):
        save_file({name: tensors[name] for name in part}, model / f"part-{i}.safetensors")
        index |= dict.fromkeys(part, f"part-{i}.safetensors")
    (model / f"{FILE}.index.json").write_text(json.dumps({"weight_map": index}))
    load_weights(model, ModelConfig.from_directory(model), torch.float32)
    (model / "part-1.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks files .*: part-1\.safetensors"):
        load_weights(model, ModelConfig.from_directory(model), torch.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, r"lacks tensors: model\.norm\.weight"),
        ({"model.layers.0.self_attn.k_proj.weight": None}, r"lacks tensors: model\.layers\.0\.self_attn\.k_proj"),
        ({"model.layers.0.self_attn.q_norm.weight": torch.ones(4)}, "LlamaForCausalLM does not have.*q_norm"),
        ({"model.norm.weight": torch.ones(8)}, r"model\.norm\.weight has shape \[8\].*\[16\]"),
        ({"model.norm.weight": torch.full((16,), torch.nan)}, r"holds NaN in tensors: model\.norm\.weight"),
        (
            {"model.norm.weight": torch.tensor([1.0] * 11 + [torch.nan] + [2.0] * 4)},
            r"holds NaN in tensors: model\.norm",
        ),
    ],
)
def test_a_file_that_does_not_fit_is_refused(model: Path, change: dict[str, torch.Tensor | None], message: str) -> None:
    rewrite(model, change)
    with pytest.raises(ModelError, match=message):
        load_weights(model, ModelConfig.from_directory(model), torch.float32)


def test_computed_buffers_of_old_checkpoints_are_ignored(model: Path) -> None:
    rewrite(model, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)})
    load_weights(model, ModelConfig.from_directory(model), torch.float32)


def test_unreadable_and_absent_files_are_refused(model: Path) -> None:
    config = ModelConfig.from_directory(model)
    content = (model / FILE).read_bytes()
    (model / FILE).write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelError, match="cannot be read"):
        load_weights(model, config, torch.float32)
    (model / FILE).unlink()
    with pytest.raises(ModelError, match=r"no \.safetensors files") as caught:
        load_weights(model, config, torch.float32)
    assert "dummy" in (caught.value.hint or "")


@pytest.mark.parametrize("stored", ["absent", "equal", "different"])
def test_tied_embeddings_follow_the_file(model: Path, stored: str) -> None:
    embedding = load_file(model / FILE)["model.embed_tokens.weight"]
    lm_head = {"absent": None, "equal": embedding.clone(), "different": embedding + 1}[stored]
    rewrite(model, {"lm_head.weight": lm_head})
    config = replace(ModelConfig.from_directory(model), tie_embeddings=True)
    weights = load_weights(model, config, torch.float32)
    assert weights.is_tied == (stored != "different")
    assert torch.equal(weights.lm_head, embedding + 1 if stored == "different" else embedding)


def test_allocation_is_nan_everywhere_and_dummy_weights_leave_none(model: Path) -> None:
    config = ModelConfig.from_directory(model)
    empty = allocate_weights(config, torch.float32)
    assert all(bool(place.isnan().all()) for place in named_destinations(config, empty).values())
    dummy = dummy_weights(config, torch.float32, seed=3)
    parameters = [dummy.embedding, dummy.final_norm, dummy.lm_head]
    parameters += [p for layer in dummy.layers for p in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    assert not any(bool(p.isnan().any()) for p in parameters)


def test_dummy_weights_are_a_function_of_the_seed(model: Path) -> None:
    config = ModelConfig.from_directory(model)
    first, again, other = (dummy_weights(config, torch.bfloat16, seed=s) for s in (1, 1, 2))
    assert torch.equal(first.layers[1].qkv, again.layers[1].qkv)
    assert not torch.equal(first.layers[1].qkv, other.layers[1].qkv)
    assert not torch.equal(first.layers[0].qkv, first.layers[1].qkv)
    assert bool((first.final_norm == 1).all())
