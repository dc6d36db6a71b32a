"""A linear layer whose weight is quantised when the layer is made."""

from torch import Tensor

from nightmill_kernels.gated_mul import Gate
from nightmill_kernels.linear_int8 import linear_int8, quantize_weight


class Int8Linear:
    """x Wᵀ + b in int8, on a CPU, gated if asked. Keeps nothing of the weight but its int8 numbers and scales."""

    __slots__ = ("_weight",)

    def __init__(self, weight: Tensor, bias: Tensor | None = None, gate: Gate | None = None) -> None:
        self._weight = quantize_weight(weight, bias, gate)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[rows, out] of x [rows, in], in x's dtype; `out`: where to."""
        return linear_int8(x, self._weight, out)
