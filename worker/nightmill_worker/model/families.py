"""From transformers' config of each supported family to our ModelConfig; everything else is refused.

A family is listed here only when a parity test shows its logits equal to transformers'.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nightmill.errors import ModelError
from nightmill_worker.model.config import Activation, LayerConfig, ModelConfig, NormPlacement, QKNorm, RopeConfig

_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}
_ROPE_KINDS = frozenset({"default", "linear", "dynamic", "llama3", "yarn", "longrope"})


def from_transformers(hf: Any, *, generation_eos: tuple[int, ...] = ()) -> ModelConfig:
    """Translate a transformers config.

    Raises:
        ModelError: naming the architecture or the feature, and what is supported.
    """
    architecture = _architecture(hf)
    family = FAMILIES.get(architecture)
    if family is None:
        raise ModelError(
            f"{architecture or hf.model_type} is not supported by the native decoder",
            hint=f"Supported: {', '.join(sorted(FAMILIES))}.",
        )
    if getattr(hf, "quantization_config", None) is not None:
        raise ModelError(
            f"{architecture} is stored quantised, which is not supported",
            hint="Use the unquantised (bf16, fp16 or fp32) model.",
        )
    if getattr(hf, "use_bidirectional_attention", False):
        raise ModelError(f"{architecture} with use_bidirectional_attention is an encoder, not a decoder")
    config = family(hf, _base(hf, architecture))
    eos = dict.fromkeys((*config.eos_token_ids, *generation_eos))
    return replace(config, eos_token_ids=tuple(eos))


def _architecture(hf: Any) -> str:
    """config.json's first architecture; a config made from its class has none, but its type tells."""
    names = getattr(hf, "architectures", None)
    return str(names[0]) if names else _BY_TYPE.get(hf.model_type, "")


def _base(hf: Any, architecture: str) -> ModelConfig:
    """Everything families have in common; full attention and rotary positions in every layer."""
    heads = hf.num_attention_heads
    kv_heads = getattr(hf, "num_key_value_heads", None) or heads
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // heads
    if heads % kv_heads:
        raise ModelError(f"{architecture}: {heads} heads cannot share {kv_heads} KV heads evenly")
    eos = getattr(hf, "eos_token_id", None)
    dtype = getattr(hf, "dtype", None)
    rope = None if _is_per_type(hf) else _rope(hf, hf.rope_parameters, head_dim, architecture)
    return ModelConfig(
        architecture=architecture,
        hidden_size=hf.hidden_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=hf.intermediate_size,
        vocab_size=hf.vocab_size,
        max_position=_max_position(hf.max_position_embeddings, rope),
        layers=(LayerConfig(rope=rope, window=None),) * hf.num_hidden_layers,
        norm_eps=hf.rms_norm_eps,
        activation=_activation(hf, architecture),
        attention_scale=head_dim**-0.5,
        tie_embeddings=bool(getattr(hf, "tie_word_embeddings", False)),
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (eos,),
        file_dtype=str(dtype).removeprefix("torch.") if dtype is not None else None,
    )


def _llama(hf: Any, base: ModelConfig) -> ModelConfig:
    bias = bool(hf.attention_bias)
    return replace(base, qkv_bias=bias, out_bias=bias, mlp_bias=bool(getattr(hf, "mlp_bias", False)))


def _mistral(hf: Any, base: ModelConfig) -> ModelConfig:
    return _with_layers(base, windows=[hf.sliding_window] * base.num_layers)


def _qwen2(hf: Any, base: ModelConfig) -> ModelConfig:
    return replace(_with_layers(base, windows=_windows(hf, base)), qkv_bias=True)


def _qwen3(hf: Any, base: ModelConfig) -> ModelConfig:
    bias = bool(hf.attention_bias)
    return replace(_with_layers(base, windows=_windows(hf, base)), qkv_bias=bias, out_bias=bias, qk_norm=QKNorm.HEAD)


def _smollm3(hf: Any, base: ModelConfig) -> ModelConfig:
    with_windows = _with_layers(base, windows=_windows(hf, base) if hf.use_sliding_window else None)
    layers = tuple(
        layer if has_rope else replace(layer, rope=None)
        for layer, has_rope in zip(with_windows.layers, hf.no_rope_layers, strict=False)
    )
    if len(layers) != base.num_layers:
        raise ModelError(f"{base.architecture}: no_rope_layers has {len(layers)} of {base.num_layers} layers")
    return replace(_llama(hf, with_windows), layers=layers)


def _gemma(hf: Any, base: ModelConfig) -> ModelConfig:
    bias = bool(hf.attention_bias)
    return replace(
        base, qkv_bias=bias, out_bias=bias, norm_weight_offset=1.0, embedding_scale=math.sqrt(base.hidden_size)
    )


def _gemma2(hf: Any, base: ModelConfig) -> ModelConfig:
    return replace(
        _with_layers(_gemma(hf, base), windows=_windows(hf, base)),
        norm_placement=NormPlacement.SANDWICH,
        attention_scale=hf.query_pre_attn_scalar**-0.5,
        attention_softcap=hf.attn_logit_softcapping,
        logit_softcap=hf.final_logit_softcapping,
    )


def _gemma3(hf: Any, base: ModelConfig) -> ModelConfig:
    if hf.attn_logit_softcapping is not None:
        raise ModelError(f"{base.architecture}: attn_logit_softcapping is not supported (transformers ignores it)")
    ropes = {
        kind: _rope(hf, hf.rope_parameters[kind], base.head_dim, base.architecture) for kind in set(hf.layer_types)
    }
    layers = tuple(
        LayerConfig(rope=ropes[kind], window=hf.sliding_window if kind == "sliding_attention" else None)
        for kind in hf.layer_types
    )
    return replace(_gemma2(hf, base), layers=layers, qk_norm=QKNorm.HEAD)


def _phi3(hf: Any, base: ModelConfig) -> ModelConfig:
    return replace(_with_layers(base, windows=[hf.sliding_window] * base.num_layers), fused_in_file=True)


def _olmo2(hf: Any, base: ModelConfig) -> ModelConfig:
    bias = bool(hf.attention_bias)
    return replace(base, qkv_bias=bias, out_bias=bias, norm_placement=NormPlacement.POST, qk_norm=QKNorm.FULL)


def _granite(hf: Any, base: ModelConfig) -> ModelConfig:
    return replace(
        _llama(hf, base),
        attention_scale=float(hf.attention_multiplier),
        embedding_scale=float(hf.embedding_multiplier),
        residual_scale=float(hf.residual_multiplier),
        logit_scale=1.0 / float(hf.logits_scaling),
    )


FAMILIES: Mapping[str, Callable[[Any, ModelConfig], ModelConfig]] = {
    "LlamaForCausalLM": _llama,  # Llama 2, 3.x, SmolLM2, TinyLlama, …
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "SmolLM3ForCausalLM": _smollm3,
    "GemmaForCausalLM": _gemma,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "Phi3ForCausalLM": _phi3,
    "Olmo2ForCausalLM": _olmo2,
    "GraniteForCausalLM": _granite,
}
_BY_TYPE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "granite": "GraniteForCausalLM",
}


def _with_layers(config: ModelConfig, *, windows: list[int | None] | None) -> ModelConfig:
    if windows is None:
        return config
    layers = tuple(replace(layer, window=w) for layer, w in zip(config.layers, windows, strict=True))
    return replace(config, layers=layers)


def _windows(hf: Any, base: ModelConfig) -> list[int | None]:
    unknown = set(hf.layer_types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ModelError(f"{base.architecture}: layers of type {', '.join(sorted(unknown))} are not supported")
    return [hf.sliding_window if kind == "sliding_attention" else None for kind in hf.layer_types]


def _activation(hf: Any, architecture: str) -> Activation:
    name = getattr(hf, "hidden_activation", None) or hf.hidden_act
    if name == "gelu" and architecture == "GemmaForCausalLM":
        name = "gelu_pytorch_tanh"  # what Gemma's first files mean by it; older transformers leave that to us
    if name not in _ACTIVATIONS:
        raise ModelError(
            f"{architecture} with activation {name!r} is not supported", hint=f"Supported: {', '.join(_ACTIVATIONS)}."
        )
    return _ACTIVATIONS[name]


def _is_per_type(hf: Any) -> bool:
    """Gemma 3 has one set of rotary parameters for each type of layer."""
    return "rope_theta" not in hf.rope_parameters


def _max_position(stated: int, rope: RopeConfig | None) -> int:
    """YaRN configs often keep the original length in max_position_embeddings and state only the factor."""
    if rope is not None and rope.kind == "yarn" and rope.original_max_position:
        return max(stated, int(rope.original_max_position * rope.factor))
    return stated


def _rope(hf: Any, parameters: Mapping[str, Any], head_dim: int, architecture: str) -> RopeConfig:
    kind = parameters.get("rope_type", "default")
    if kind not in _ROPE_KINDS:
        raise ModelError(
            f"{architecture} with rotary embedding {kind!r} is not supported",
            hint=f"Supported: {', '.join(sorted(_ROPE_KINDS))}.",
        )
    # transformers' default rotation ignores a partial factor except in the families that define it.
    partial = parameters.get("partial_rotary_factor") or 1.0
    if partial != 1.0 and kind == "default" and architecture != "Phi3ForCausalLM":
        raise ModelError(f"{architecture} with partial_rotary_factor {partial} is not supported")
    original = parameters.get("original_max_position_embeddings")
    if kind == "dynamic":
        original = hf.max_position_embeddings
    factor = parameters.get("factor")
    if factor is None and original:
        factor = hf.max_position_embeddings / original
    return RopeConfig(
        kind=kind,
        theta=float(parameters["rope_theta"]),
        rotary_dim=int(head_dim * partial),
        factor=float(factor or 1.0),
        original_max_position=original,
        low_freq_factor=float(parameters.get("low_freq_factor") or 1.0),
        high_freq_factor=float(parameters.get("high_freq_factor") or 1.0),
        attention_factor=_attention_factor(kind, parameters, float(factor or 1.0), original),
        beta_fast=float(parameters.get("beta_fast") or 32.0),
        beta_slow=float(parameters.get("beta_slow") or 1.0),
        truncate=bool(parameters.get("truncate", True)),
        short_factor=tuple(float(f) for f in parameters.get("short_factor") or ()),
    )


def _attention_factor(kind: str, parameters: Mapping[str, Any], factor: float, original: int | None) -> float:
    """YaRN (section 3.4 of its paper) and LongRoPE scale cos and sin to make up for the stretched attention."""
    stated = parameters.get("attention_factor")
    if kind not in ("yarn", "longrope"):
        return 1.0
    if stated is not None:
        return float(stated)
    if factor <= 1.0:
        return 1.0
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original or math.e))
    mscale, mscale_all = (float(parameters.get(key) or 0.0) for key in ("mscale", "mscale_all_dim"))
    if mscale and mscale_all:
        return (0.1 * mscale * math.log(factor) + 1.0) / (0.1 * mscale_all * math.log(factor) + 1.0)
    return 0.1 * math.log(factor) + 1.0
