"""What a decoder needs to know of a model: one frozen record, the same for every family."""

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from nightmill.errors import ModelError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class NormPlacement(StrEnum):
    """Where a layer normalises, around attention and around the feed-forward part alike."""

    PRE = "pre"
    """Before each part (Llama)."""
    POST = "post"
    """After each part, before the residual is added (OLMo-2)."""
    SANDWICH = "sandwich"
    """Before and after (Gemma 2)."""


class QKNorm(StrEnum):
    """Whether, and over what, queries and keys are normalised before the rotation."""

    NONE = "none"
    HEAD = "head"
    """Each head on its own, one weight of head_dim (Qwen3, Gemma 3)."""
    FULL = "full"
    """All heads of a token together (OLMo-2)."""


class Activation(StrEnum):
    """The gated feed-forward part's activation."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of a layer. Fields a kind does not use keep their defaults."""

    kind: str  # default | linear | dynamic | llama3 | yarn | longrope
    theta: float
    rotary_dim: int  # leading part of head_dim that is rotated
    factor: float = 1.0
    original_max_position: int | None = None  # llama3, yarn, longrope; dynamic: where stretching would begin
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    attention_factor: float = 1.0  # cos and sin are multiplied by it
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """What differs from layer to layer."""

    rope: RopeConfig | None  # None: no positions in this layer (SmolLM3)
    window: int | None  # tokens a query sees, itself included; None: all


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only model of a supported family, with every difference between families spelled out."""

    architecture: str  # transformers' class name
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position: int  # positions the model was made for
    layers: tuple[LayerConfig, ...]
    norm_eps: float
    attention_scale: float
    tie_embeddings: bool
    eos_token_ids: tuple[int, ...]
    file_dtype: str | None  # what config.json says the weights are
    activation: Activation = Activation.SILU
    norm_placement: NormPlacement = NormPlacement.PRE
    qk_norm: QKNorm = QKNorm.NONE
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    fused_in_file: bool = False  # the file already holds qkv_proj and gate_up_proj (Phi-3)
    norm_weight_offset: float = 0.0  # Gemma's norms multiply by 1 + weight
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @property
    def num_qkv_rows(self) -> int:
        """Output rows of the fused query, key and value projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of K and V that one token holds in the page pool."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[dtype]

    def resolve_max_model_len(self, requested: int | None) -> int:
        """Tokens (prompt and completion) a sequence may have.

        Raises:
            ModelError: more than the model has positions for.
        """
        limit = self.max_position
        for layer in self.layers:
            # These two change every position's rotation once a sequence outgrows the original length: keys
            # already in the pool would be wrong.
            if layer.rope is not None and layer.rope.kind in ("longrope", "dynamic"):
                limit = min(limit, layer.rope.original_max_position or limit)
        if requested is None:
            return limit
        if not 1 <= requested <= limit:
            raise ModelError(
                f"max_model_len is {requested}, but {self.architecture} here has {limit} positions",
                hint=f"Pass --max-model-len between 1 and {limit}, or leave it out.",
            )
        return requested

    @classmethod
    def from_directory(cls, directory: Path) -> "ModelConfig":
        """Read config.json (through transformers' AutoConfig) and generation_config.json.

        Raises:
            ModelError: no readable config, or an architecture or feature that is not supported.
        """
        from transformers import AutoConfig

        from nightmill_worker.model.families import from_transformers

        if not (directory / "config.json").is_file():
            raise ModelError(f"{directory} has no config.json: it is not a model directory")
        try:
            hf_config: Any = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        except (ValueError, KeyError, TypeError, OSError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ModelError(f"{directory / 'config.json'} cannot be read as a model config: {reason}") from error
        return from_transformers(hf_config, generation_eos=_generation_eos(directory))


def _generation_eos(directory: Path) -> tuple[int, ...]:
    path = directory / "generation_config.json"
    if not path.is_file():
        return ()
    try:
        value = json.loads(path.read_text()).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise ModelError(f"{path} is not a JSON object: {error}") from error
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)
