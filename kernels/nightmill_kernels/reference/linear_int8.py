"""Matrix products of int8 numbers in plain torch: exact sums, then one scaling in fp32 and one rounding."""

import torch
from torch import Tensor

LARGEST = 127
TINY = 2.0**-100
"""A row or a channel whose largest magnitude is below this counts as zeros: 127 / it would overflow."""

# Sums of so many products of int8 numbers stay below 2^24, so fp32 holds each of them exactly, in any order.
_EXACT_COLUMNS = 1024


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Each row of [R, K] as int8 [R, K] in ±127 and an fp32 scale [R]: row ≈ q · scale.

    q = round(x · (127 / a)), ties to even, and scale = a / 127, with a the row's largest magnitude. A row that holds
    an infinity or NaN has zeros and the scale NaN: what is computed from it is NaN, and shows.
    """
    x = rows.float()
    largest = x.abs().amax(dim=1) if x.shape[1] else x.new_zeros(len(x))
    is_sound = largest.isfinite() & (largest >= TINY)
    # Two tensors: torch makes number / tensor of a reciprocal and a product, which rounds twice.
    factor = torch.where(is_sound, torch.full_like(largest, LARGEST) / largest, 0.0)
    scale = torch.where(is_sound, largest / LARGEST, 0.0).masked_fill(~largest.isfinite(), torch.nan)
    q = torch.where(is_sound.unsqueeze(1), x * factor.unsqueeze(1), 0.0).round()
    return q.to(torch.int8), scale


def integer_product(a: Tensor, b: Tensor) -> Tensor:
    """int32 [M, N]: a Bᵀ of int8 a [M, K] and b [N, K], exact."""
    total = torch.zeros(len(a), len(b), dtype=torch.int32)
    for first in range(0, a.shape[1], _EXACT_COLUMNS):
        columns = slice(first, first + _EXACT_COLUMNS)
        total += (a[:, columns].float() @ b[:, columns].float().t()).to(torch.int32)
    return total


def linear_int8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """x Wᵀ + b in x's dtype: x [M, K] quantised row by row, weight int8 [N, K], scale and bias fp32 [N].

    float(Σ) · (row scale · channel scale) + bias, in this order, each step rounded to fp32.
    """
    q, row_scale = quantize(x)
    sums = integer_product(q, weight).float()
    return (sums * (row_scale.unsqueeze(1) * scale) + bias).to(x.dtype)
