"""Matrix products of int8 numbers in plain torch: exact sums of 32 products, scaled and added up in fp32."""

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32
"""Inputs of a row that share a scale."""

LARGEST = 127
TINY = 2.0**-100
"""Numbers whose largest magnitude is below this count as zeros: 127 / it would overflow."""


def quantize(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """[…, K] as int8 in ±127 and an fp32 scale […]: numbers ≈ int8 · scale.

    int8 = round(x · (127 / a)), ties to even, and scale = a / 127, with a the largest magnitude of the last dimension.
    Where there is an infinity or NaN, the int8 are zeros and the scale NaN: what is computed from it is NaN, and shows.
    """
    x = numbers.float()
    largest = x.abs().amax(dim=-1)
    is_sound = largest.isfinite() & (largest >= TINY)
    # Two tensors: torch makes number / tensor of a reciprocal and a product, which rounds twice.
    factor = torch.where(is_sound, torch.full_like(largest, LARGEST) / largest, 0.0)
    scale = torch.where(is_sound, largest / LARGEST, 0.0).masked_fill(~largest.isfinite(), torch.nan)
    q = torch.where(is_sound.unsqueeze(-1), x * factor.unsqueeze(-1), 0.0).round()
    return q.to(torch.int8), scale


def linear_int8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """x Wᵀ + b in x's dtype: x [M, K], weight int8 [N, K] and its channels' scales and biases, fp32 [N].

    Every 32 inputs of a row are quantised by themselves. (Σ over groups of float(Σ of a group) · group scale) · channel
    scale + bias, groups in order, each step rounded to fp32.
    """
    num_groups, padding = -(-x.shape[1] // GROUP), (0, -x.shape[1] % GROUP)
    numbers, scales = quantize(F.pad(x.float(), padding).view(-1, num_groups, GROUP))
    total = x.new_zeros(len(x), len(weight), dtype=torch.float32)
    for g, columns in enumerate(F.pad(weight, padding).view(-1, num_groups, GROUP).unbind(1)):
        # fp32 holds sums of 32 products of int8 exactly, in any order.
        sums = numbers[:, g].float() @ columns.float().t()
        total += sums * scales[:, g : g + 1]
    return (total * scale + bias).to(x.dtype)
