"""Memory that every layer of a step writes its results to: allocated once, warm in the caches, at fixed places."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from nightmill_worker.model.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBuffers:
    """Where a step of T tokens puts what it computes; None: wherever memory is found."""

    residual: Tensor | None = None  # [T, d]
    hidden: Tensor | None = None  # [T, d]
    qkv: Tensor | None = None  # [T, (H + 2 Hk) · D]
    mixed: Tensor | None = None  # [T, H, D]
    delta: Tensor | None = None  # [T, d]
    gated: Tensor | None = None  # [T, f]

    def first(self, num_tokens: int) -> "LayerBuffers":
        """For fewer tokens, at the same place."""
        return LayerBuffers(**{f.name: _first(getattr(self, f.name), num_tokens) for f in fields(self)})


def _first(buffer: Tensor | None, num_tokens: int) -> Tensor | None:
    return None if buffer is None else buffer[:num_tokens]


ANYWHERE = LayerBuffers()


class Workspace:
    """Buffers for steps of any size. A step's results are overwritten by the next layer and the next step."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, *, max_tokens: int) -> None:
        """`max_tokens`: larger steps get buffers of their own."""
        c = config
        self._max_tokens = max_tokens
        self._shape = (c.num_heads, c.head_dim)
        widths = {
            "residual": c.hidden_size,
            "hidden": c.hidden_size,
            "qkv": (c.num_heads + 2 * c.num_kv_heads) * c.head_dim,
            "mixed": c.num_heads * c.head_dim,
            "delta": c.hidden_size,
            "gated": c.intermediate_size,
        }
        self._memory = {name: torch.empty(max_tokens, width, dtype=dtype) for name, width in widths.items()}
        self._last: tuple[int, LayerBuffers] = (0, ANYWHERE)

    def residual(self, num_tokens: int) -> Tensor:
        """That buffer alone, of at most `max_tokens` rows."""
        return self._memory["residual"][:num_tokens]

    def take(self, num_tokens: int) -> LayerBuffers:
        """The buffers' first rows; always the same memory."""
        if num_tokens > self._max_tokens:
            return ANYWHERE
        if self._last[0] != num_tokens:
            rows = {name: memory[:num_tokens] for name, memory in self._memory.items()}
            rows["mixed"] = rows["mixed"].view(num_tokens, *self._shape)
            self._last = (num_tokens, LayerBuffers(**rows))
        return self._last[1]
