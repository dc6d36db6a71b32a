"""One decoder layer: attention over the page pool and the gated feed-forward part, for every family."""

from dataclasses import dataclass

from torch import Tensor

from nightmill_kernels.gated_mul import Gate
from nightmill_kernels.metadata import AttentionMetadata
from nightmill_kernels.paged_attention import paged_attention
from nightmill_kernels.qk_norm_rope import HeadNorms, qk_norm_rope
from nightmill_kernels.rms_norm import add_rms_norm, rms_norm
from nightmill_worker.model.config import Activation, ModelConfig, QKNorm
from nightmill_worker.model.linear import Linear
from nightmill_worker.model.quantization import MakeLinear
from nightmill_worker.model.weights import LayerWeights
from nightmill_worker.model.workspace import ANYWHERE, LayerBuffers

_GATES = {Activation.SILU: Gate.SILU, Activation.GELU_TANH: Gate.GELU_TANH}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTensors:
    """A step's flat inputs on the model's device: T tokens, R of which end in a draw."""

    token_ids: Tensor  # int32 [T]
    positions: Tensor  # int32 [T]
    slots: Tensor  # int64 [T]
    attention: AttentionMetadata
    sampled: Tensor | None  # int32 or int64 [R] indices into T; None: every token, in order
    drawn: AttentionMetadata | None = None  # attention of those R alone, which then ascend, int32; None: not prepared
    token_index: Tensor | None = None  # int32 [T] which of token_ids, then of any length, the tokens are
    buffers: LayerBuffers = ANYWHERE


class Layer:
    """One layer's weights, its K and V pages, and how they are combined."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        weights: LayerWeights,
        pages: tuple[Tensor, Tensor],
        cos_sin: Tensor | None,
        make_linear: MakeLinear = Linear,
    ) -> None:
        self._config = config
        self._qkv = make_linear(weights.qkv, weights.qkv_bias, None)
        self._out = make_linear(weights.out, weights.out_bias, None)
        self._gate_up = make_linear(weights.gate_up, weights.gate_up_bias, _GATES[config.activation])
        self._down = make_linear(weights.down, weights.down_bias, None)
        self._attention_norm, self._attention_post_norm = weights.attention_norm, weights.attention_post_norm
        self._mlp_norm, self._mlp_post_norm = weights.mlp_norm, weights.mlp_post_norm
        self._q_norm, self._k_norm = weights.q_norm, weights.k_norm
        self._head_norms = _head_norms(config, weights)
        self._k_pages, self._v_pages = pages
        self._cos_sin = cos_sin  # None: no positions in this layer
        self._window = config.layers[index].window

    def bind(self, pages: tuple[Tensor, Tensor]) -> None:
        """Keep K and V there from now on."""
        self._k_pages, self._v_pages = pages

    def store(self, delta: Tensor | None, residual: Tensor, step: StepTensors) -> tuple[Tensor, Tensor]:
        """Up to attention: K and V of every token into their pages.

        Args:
            delta: [T, d], what the layer before adds to the residual; None in the first layer.
            residual: [T, d], updated in place.
            step: where the tokens stand, and where results go.

        Returns:
            q [T, H, D] and the new residual.
        """
        c, buffers = self._config, step.buffers
        hidden, residual = self._enter(delta, residual, self._attention_norm, buffers.hidden)
        qkv = self._qkv(hidden, buffers.qkv).view(-1, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        q, k, v = qkv.split_with_sizes((c.num_heads, c.num_kv_heads, c.num_kv_heads), dim=1)
        if c.qk_norm is QKNorm.FULL:
            q, k = self._norm_all_heads(q, self._q_norm), self._norm_all_heads(k, self._k_norm)
        q = qk_norm_rope(
            q,
            k,
            v,
            step.positions,
            self._k_pages,
            self._v_pages,
            step.slots,
            cos_sin=self._cos_sin,
            norms=self._head_norms,
        )
        return q, residual

    def attend(self, q: Tensor, meta: AttentionMetadata, buffers: LayerBuffers = ANYWHERE) -> Tensor:
        """Attention [T, H · D] of q [T, H, D] over everything each token may see, before the output projection."""
        c = self._config
        mixed = paged_attention(
            q,
            self._k_pages,
            self._v_pages,
            meta,
            scale=c.attention_scale,
            window=self._window,
            softcap=c.attention_softcap,
            out=buffers.mixed,
        )
        return mixed.flatten(1)

    def feed_forward(self, mixed: Tensor, residual: Tensor, buffers: LayerBuffers = ANYWHERE) -> tuple[Tensor, Tensor]:
        """Output projection, then the feed-forward part: (what is to be added to the residual, the residual)."""
        delta = self._leave(self._out(mixed, buffers.delta), self._attention_post_norm)
        hidden, residual = self._enter(delta, residual, self._mlp_norm, buffers.hidden)
        delta = self._down(self._gate_up(hidden, buffers.gated), buffers.delta)
        return self._leave(delta, self._mlp_post_norm), residual

    def _enter(
        self, delta: Tensor | None, residual: Tensor, norm: Tensor | None, out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Add the last part's result to the residual and normalise it for the next."""
        c = self._config
        if norm is None:
            residual = residual if delta is None else residual.add_(delta)
            return residual, residual
        if delta is None:
            return rms_norm(residual, norm, c.norm_eps, weight_offset=c.norm_weight_offset, out=out), residual
        return add_rms_norm(delta, residual, norm, c.norm_eps, weight_offset=c.norm_weight_offset, out=out)

    def _leave(self, delta: Tensor, norm: Tensor | None) -> Tensor:
        c = self._config
        if norm is not None:
            delta = rms_norm(delta, norm, c.norm_eps, weight_offset=c.norm_weight_offset, out=delta)
        return delta if c.residual_scale == 1.0 else delta.mul_(c.residual_scale)

    def _norm_all_heads(self, heads: Tensor, norm: Tensor | None) -> Tensor:
        """[T, heads, D] normalised over all heads of a token together."""
        return heads if norm is None else rms_norm(heads.flatten(1), norm, self._config.norm_eps).view(heads.shape)


def _head_norms(config: ModelConfig, weights: LayerWeights) -> HeadNorms | None:
    if config.qk_norm is not QKNorm.HEAD or weights.q_norm is None or weights.k_norm is None:
        return None
    return HeadNorms(q=weights.q_norm, k=weights.k_norm, eps=config.norm_eps, weight_offset=config.norm_weight_offset)
