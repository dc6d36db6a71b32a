"""Model weights: fused, allocated once, filled from safetensors shard by shard."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nightmill.errors import ModelError
from nightmill_worker.model.config import ModelConfig, NormPlacement, QKNorm

_LM_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
# Buffers that old checkpoints carry; they are computed, not learned.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".attn.masked_bias", ".attn.bias")
_NAMES_SHOWN = 5


@dataclass(slots=True, kw_only=True)
class LayerWeights:
    """One layer; d = hidden, F = intermediate, D = head_dim, H, Hk = heads, KV heads; None where a family has none."""

    qkv: Tensor  # [(H + 2 Hk) D, d] queries, keys, values
    qkv_bias: Tensor | None
    out: Tensor  # [d, H D]
    out_bias: Tensor | None
    gate_up: Tensor  # [2 F, d]
    gate_up_bias: Tensor | None
    down: Tensor  # [d, F]
    down_bias: Tensor | None
    attention_norm: Tensor | None  # [d] before attention
    attention_post_norm: Tensor | None  # [d] after it
    mlp_norm: Tensor | None  # [d]
    mlp_post_norm: Tensor | None  # [d]
    q_norm: Tensor | None  # [D] or, over all heads, [H D]
    k_norm: Tensor | None  # [D] or [Hk D]


@dataclass(slots=True, kw_only=True)
class ModelWeights:
    """All of a model's parameters."""

    embedding: Tensor  # [vocab, d]
    layers: list[LayerWeights]
    final_norm: Tensor  # [d]
    lm_head: Tensor  # [vocab, d]; the embedding itself where they are tied

    @property
    def is_tied(self) -> bool:
        """True when the output projection is the embedding."""
        return self.lm_head is self.embedding


def allocate_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> ModelWeights:
    """Every parameter at its final place, filled with NaN, so that one that is never loaded cannot go unnoticed."""

    def new(*shape: int) -> Tensor:
        return torch.full(shape, torch.nan, dtype=dtype, device=device)

    embedding = new(config.vocab_size, config.hidden_size)
    return ModelWeights(
        embedding=embedding,
        layers=[_allocate_layer(config, dtype, device) for _ in range(config.num_layers)],
        final_norm=new(config.hidden_size),
        lm_head=embedding if config.tie_embeddings else new(config.vocab_size, config.hidden_size),
    )


def _allocate_layer(config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> LayerWeights:
    d, ffn = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def new(*shape: int) -> Tensor:
        return torch.full(shape, torch.nan, dtype=dtype, device=device)

    def optional(wanted: bool, size: int) -> Tensor | None:
        return new(size) if wanted else None

    has_pre = config.norm_placement is not NormPlacement.POST
    has_post = config.norm_placement is not NormPlacement.PRE
    has_qk = config.qk_norm is not QKNorm.NONE
    by_head = config.qk_norm is QKNorm.HEAD
    return LayerWeights(
        qkv=new(config.num_qkv_rows, d),
        qkv_bias=optional(config.qkv_bias, config.num_qkv_rows),
        out=new(d, q_size),
        out_bias=optional(config.out_bias, d),
        gate_up=new(2 * ffn, d),
        gate_up_bias=optional(config.mlp_bias, 2 * ffn),
        down=new(d, ffn),
        down_bias=optional(config.mlp_bias, d),
        attention_norm=optional(has_pre, d),
        attention_post_norm=optional(has_post, d),
        mlp_norm=optional(has_pre, d),
        mlp_post_norm=optional(has_post, d),
        q_norm=optional(has_qk, config.head_dim if by_head else q_size),
        k_norm=optional(has_qk, config.head_dim if by_head else kv_size),
    )


def named_destinations(config: ModelConfig, weights: ModelWeights) -> dict[str, Tensor]:
    """Where each tensor of a checkpoint goes: its name there → a parameter, or its part of a fused one."""
    places = {_EMBEDDING: weights.embedding, "model.norm.weight": weights.final_norm}
    if not weights.is_tied:
        places[_LM_HEAD] = weights.lm_head
    for index, layer in enumerate(weights.layers):
        for name, place in _layer_destinations(config, layer).items():
            places[f"model.layers.{index}.{name}"] = place
    return places


def _layer_destinations(config: ModelConfig, layer: LayerWeights) -> dict[str, Tensor]:
    places: dict[str, Tensor | None] = {
        "self_attn.o_proj.weight": layer.out,
        "self_attn.o_proj.bias": layer.out_bias,
        "mlp.down_proj.weight": layer.down,
        "mlp.down_proj.bias": layer.down_bias,
        "self_attn.q_norm.weight": layer.q_norm,
        "self_attn.k_norm.weight": layer.k_norm,
    }
    for kind, qkv, gate_up in (
        ("weight", layer.qkv, layer.gate_up),
        ("bias", layer.qkv_bias, layer.gate_up_bias),
    ):
        if config.fused_in_file:
            places[f"self_attn.qkv_proj.{kind}"] = qkv
            places[f"mlp.gate_up_proj.{kind}"] = gate_up
            continue
        if qkv is not None:
            q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
            parts = zip("qkv", torch.split(qkv, [q_size, kv_size, kv_size]), strict=True)
            places |= {f"self_attn.{letter}_proj.{kind}": part for letter, part in parts}
        if gate_up is not None:
            gate, up = torch.split(gate_up, config.intermediate_size)
            places |= {f"mlp.gate_proj.{kind}": gate, f"mlp.up_proj.{kind}": up}
    places |= _norm_destinations(config, layer)
    return {name: place for name, place in places.items() if place is not None}


def _norm_destinations(config: ModelConfig, layer: LayerWeights) -> dict[str, Tensor | None]:
    """`post_attention_layernorm` stands before the feed-forward part in Llama, after attention in the others."""
    if config.norm_placement is NormPlacement.PRE:
        return {"input_layernorm.weight": layer.attention_norm, "post_attention_layernorm.weight": layer.mlp_norm}
    return {
        "input_layernorm.weight": layer.attention_norm,
        "post_attention_layernorm.weight": layer.attention_post_norm,
        "pre_feedforward_layernorm.weight": layer.mlp_norm,
        "post_feedforward_layernorm.weight": layer.mlp_post_norm,
    }


def load_weights(
    directory: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> ModelWeights:
    """Load the safetensors files of a model directory; one tensor at a time is held beside the result.

    Raises:
        ModelError: no or unreadable files; tensors that are missing, unexpected, of another shape or hold NaN.
    """
    weights = allocate_weights(config, dtype, device)
    places = named_destinations(config, weights)
    unexpected: list[str] = []
    waiting = set(places)
    for name, tensor in _stored_tensors(directory):
        if name == _LM_HEAD and weights.is_tied:
            _untie_if_different(weights, tensor, places, waiting)
            continue
        place = places.get(name)
        if place is None:
            if not name.endswith(_IGNORED_SUFFIXES):
                unexpected.append(name)
            continue
        if place.shape != tensor.shape:
            raise ModelError(
                f"{directory}: tensor {name} has shape {list(tensor.shape)}, but config.json asks for "
                f"{list(place.shape)}",
                hint="The weights and config.json are not from the same model.",
            )
        place.copy_(tensor)
        waiting.discard(name)
    _refuse(directory, "lacks tensors", sorted(waiting))
    _refuse(directory, f"holds tensors that {config.architecture} does not have", unexpected)
    _retie_if_equal(weights)
    # Smallest and largest of a tensor with NaN are NaN: ten times as fast as asking each element.
    _refuse(directory, "holds NaN in tensors", [name for name, place in places.items() if place.aminmax().min.isnan()])
    return weights


def _untie_if_different(weights: ModelWeights, lm_head: Tensor, places: dict[str, Tensor], waiting: set[str]) -> None:
    """A tied model's file may still hold an output projection; transformers uses it when it differs."""
    weights.lm_head = lm_head.to(weights.embedding.dtype, copy=True).to(weights.embedding.device)
    places[_LM_HEAD] = weights.lm_head
    waiting.discard(_LM_HEAD)


def _retie_if_equal(weights: ModelWeights) -> None:
    if not weights.is_tied and torch.equal(weights.lm_head, weights.embedding):
        weights.lm_head = weights.embedding


def _stored_tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    for path in _weight_files(directory):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 -- a safetensors file is not iterable
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} cannot be read: {error}", hint="Fetch the model again.") from error


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        files = [directory / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        _refuse(directory, f"lacks files that {index.name} names", [p.name for p in files if not p.is_file()])
        return files
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelError(
            f"{directory} has no .safetensors files",
            hint="Convert the weights to safetensors, or pass --load-format dummy for random weights.",
        )
    return files


def _refuse(directory: Path, what: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        raise ModelError(f"{directory} {what}: {', '.join(names[:_NAMES_SHOWN])}{more}")
