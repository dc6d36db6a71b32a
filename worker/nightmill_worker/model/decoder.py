"""The decoder: one module, driven by ModelConfig, for every supported family."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from nightmill_kernels.keep_rows import keep_rows
from nightmill_kernels.rms_norm import add_rms_norm
from nightmill_worker.model.config import ModelConfig, RopeConfig
from nightmill_worker.model.layers import Layer, StepTensors
from nightmill_worker.model.linear import Linear, rows_of
from nightmill_worker.model.pool import KVPool
from nightmill_worker.model.quantization import linear_maker
from nightmill_worker.model.rope import rope_table
from nightmill_worker.model.weights import ModelWeights
from nightmill_worker.model.workspace import ANYWHERE


class Decoder:
    """Weights and page pool, put together; holds no state of its own between steps.

    Takes the weights over: `weights.layers` is emptied as it goes, so that packing never holds the model twice.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        pool: KVPool,
        *,
        max_model_len: int,
        quantization: str | None = None,
    ) -> None:
        self._config = config
        self._lm_head = Linear(weights.lm_head, has_rows=weights.is_tied)
        # A tied embedding is looked up in the head, wherever that has its weight: one copy.
        self._embed: Callable[[Tensor, Tensor | None], Tensor] = (
            self._lm_head.rows if weights.is_tied else partial(rows_of, weights.embedding)
        )
        self._final_norm = weights.final_norm
        # As transformers: the factor is rounded to the model's dtype first.
        self._embedding_scale = float(torch.tensor(config.embedding_scale).to(weights.embedding.dtype))
        device = weights.embedding.device
        kinds = {layer.rope for layer in config.layers if layer.rope is not None}
        tables: dict[RopeConfig, Tensor] = {kind: rope_table(kind, max_model_len, device) for kind in kinds}
        make_linear = linear_maker(quantization)
        self._layers = [
            Layer(
                config, i, weights.layers.pop(0), pool.layer(i), tables[layer.rope] if layer.rope else None, make_linear
            )
            for i, layer in enumerate(config.layers)
        ]

    def forward(self, step: StepTensors) -> Tensor:
        """Write K and V of every token; the hidden states [R, d], after the last norm, of those that draw."""
        token_ids = step.token_ids
        if step.token_index is not None:
            token_ids = token_ids.index_select(0, step.token_index)
        return self.run_layers(self.embed(token_ids, step.buffers.residual), step)

    def embed(self, token_ids: Tensor, out: Tensor | None = None) -> Tensor:
        """[T, d] of token ids [T], int32 or int64: what the first layer gets; into `out` if it is given."""
        residual = self._embed(token_ids, out)
        if self._embedding_scale != 1.0:
            residual *= self._embedding_scale
        return residual

    def run_layers(self, residual: Tensor, step: StepTensors) -> Tensor:
        """`forward` from the embedding [T, d] on, which is overwritten."""
        delta: Tensor | None = None
        buffers, last = step.buffers, self._layers[-1]
        for layer in self._layers[:-1]:
            q, residual = layer.store(delta, residual, step)
            delta, residual = layer.feed_forward(layer.attend(q, step.attention, buffers), residual, buffers)
        q, residual = last.store(delta, residual, step)
        if step.sampled is None:
            mixed = last.attend(q, step.attention, buffers)
        elif not len(step.sampled):
            return residual[:0]
        elif step.drawn is not None:
            # Nothing reads the other tokens' outputs of the last layer.
            q, residual = keep_rows(q, step.sampled), keep_rows(residual, step.sampled)
            buffers = buffers.first(len(step.sampled))
            mixed = last.attend(q, step.drawn, buffers)
        else:
            mixed = last.attend(q, step.attention, buffers).index_select(0, step.sampled)
            residual, buffers = residual.index_select(0, step.sampled), ANYWHERE  # those are for all tokens
        delta, residual = last.feed_forward(mixed, residual, buffers)
        c = self._config
        hidden, _ = add_rms_norm(
            delta, residual, self._final_norm, c.norm_eps, weight_offset=c.norm_weight_offset, out=buffers.hidden
        )
        return hidden

    def bind(self, pool: KVPool) -> None:
        """Use another page pool from now on: how large it may be is known only once the model has run."""
        for index, layer in enumerate(self._layers):
            layer.bind(pool.layer(index))

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, vocab] of hidden states [R, d], in the model's dtype, or float32 where the family reshapes them."""
        return self.shape_logits(self.project(hidden))

    def project(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """The output projection alone, [R, vocab] in the model's dtype; into `out` if it is given."""
        return self._lm_head(hidden, out)

    def shape_logits(self, logits: Tensor) -> Tensor:
        """What the family does to them after the projection: as they are, or scaled and capped in float32."""
        c = self._config
        if c.logit_scale != 1.0:
            logits = logits.float().mul_(c.logit_scale)
        if c.logit_softcap is not None:
            logits = logits.float().div_(c.logit_softcap).tanh_().mul_(c.logit_softcap)
        return logits
