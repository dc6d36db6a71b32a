"""Linear layers in plain torch."""

import torch.nn.functional as F
from torch import Tensor

from nightmill_kernels.reference.gated_mul import gelu_mul, silu_mul


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + b, summed in fp32, rounded once."""
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, gelu: bool) -> Tensor:
    """gate(first half of the layer's outputs) · second half; both are rounded before they are multiplied."""
    return (gelu_mul if gelu else silu_mul)(linear(x, weight, bias))
