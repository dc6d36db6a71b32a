"""A linear layer, with its weight laid out for the processor's matrix kernels where that is possible."""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

# What the packed layout is chosen for. One layout serves every batch: measured with AVX-512-bf16, shapes of
# SmolLM2-135M, it is 1.9× plain linear at 1 to 8 rows, 1.2× at 64 and 1.05× at 512; float32 1.2× to 1.8×.
_ROWS_HINT = 64


class Linear:
    """x Wᵀ + b. Takes the weight over: packed, the plain tensor can be freed once its owner drops it."""

    __slots__ = ("_bias", "_packed", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, pack: bool = True) -> None:
        self._bias = bias
        self._packed = _pack(weight) if pack and _can_pack(weight.device.type, weight.dtype) else None
        self._weight = None if self._packed is not None else weight

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[rows, out] of x [rows, in]; rows ≥ 1. `out`: where to; a recorded graph's result has a place of its own."""
        if out is not None:
            if self._weight is None or self._bias is not None:
                return out.copy_(self(x))
            return torch.mm(x, self._weight.t(), out=out)
        if self._weight is not None:
            return F.linear(x, self._weight, self._bias)
        return _packed_linear(x, self._packed, self._bias)


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)
    return packed


def _packed_linear(x: Tensor, packed: Tensor | None, bias: Tensor | None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return result


@cache
def _can_pack(device: str, dtype: torch.dtype) -> bool:
    """True when this torch build packs weights of the dtype, and multiplies right with them.

    The two operators are those that torch's own compiler emits; they have no public name, so they are tried once.
    """
    if device != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return False
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 32, generator=generator).to(dtype)
    weight = torch.randn(48, 32, generator=generator).to(dtype)
    bias = torch.randn(48, generator=generator).to(dtype)
    try:
        packed = _packed_linear(x, _pack(weight), bias)
    except (AttributeError, RuntimeError, TypeError):  # no such operator, a build without oneDNN, or no such layout
        return False
    return torch.allclose(packed.float(), F.linear(x.float(), weight.float(), bias.float()), rtol=0.02, atol=0.1)
