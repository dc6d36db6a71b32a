"""A linear layer, with its weight laid out for whatever multiplies fastest on this machine."""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from nightmill_kernels.gated_mul import Gate, gated_mul
from nightmill_kernels.linear import PackedLinear, pack_linear

# What oneDNN's packed layout is chosen for. One layout serves every batch: measured with AVX-512-bf16, shapes of
# SmolLM2-135M, it is 1.9× plain linear at 1 to 8 rows, 1.2× at 64 and 1.05× at 512; float32 1.2× to 1.8×.
_ROWS_HINT = 64


class Linear:
    """x Wᵀ + b, gated if asked. Takes the weight over: packed, the plain tensor can be freed once its owner drops it.

    Packed for our C kernels where they are the fastest (`nightmill_kernels.linear.is_ours`), else for oneDNN, else
    plain. With `rows`, the weight's rows can be looked up too: a tied head, which then lies in memory once.
    """

    __slots__ = ("_bias", "_gate", "_packed", "_weight")

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        gate: Gate | None = None,
        *,
        has_rows: bool = False,
    ) -> None:
        self._bias = bias
        self._gate = gate
        self._weight: Tensor | None = None
        self._packed: PackedLinear | Tensor | None = pack_linear(weight, bias, gate)
        if self._packed is None and not has_rows and _can_pack(weight.device.type, weight.dtype):
            self._packed = _pack(weight)
        if self._packed is None:
            self._weight = weight

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[rows, out] of x [rows, in]; rows ≥ 1. `out`: where to; a recorded graph's result has a place of its own."""
        packed = self._packed
        if isinstance(packed, PackedLinear):
            return packed(x, out)
        if out is not None:
            if self._weight is None or self._bias is not None or self._gate is not None:
                return out.copy_(self(x))
            return torch.mm(x, self._weight.t(), out=out)
        result = F.linear(x, self._plain(), self._bias) if packed is None else _packed_linear(x, packed, self._bias)
        return result if self._gate is None else gated_mul(result, self._gate)

    def rows(self, index: Tensor, out: Tensor | None = None) -> Tensor:
        """[R, in], rows of the weight by their numbers, int32 or int64 [R]; the layer was made with `has_rows`."""
        if isinstance(self._packed, PackedLinear):
            return self._packed.rows(index, out)
        return rows_of(self._plain(), index, out)

    def _plain(self) -> Tensor:
        if self._weight is None:
            raise RuntimeError("the rows of a weight packed by oneDNN cannot be read: make the layer with has_rows")
        return self._weight


def rows_of(weight: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """[R, in], rows of a plain weight by their numbers, int32 or int64 [R]; `out`: where to."""
    return F.embedding(index, weight) if out is None else torch.index_select(weight, 0, index, out=out)


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)
    return packed


def _packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
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
