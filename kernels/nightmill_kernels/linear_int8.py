"""Linear layers whose weights are int8, a scale for each output channel; rows are quantised as they come."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nightmill_kernels.backend import library_for
from nightmill_kernels.cpu.library import DTYPES, LinearInt8Call
from nightmill_kernels.reference import linear_int8 as reference

MAX_INPUTS = 1 << 17
"""More, and a sum of products may not fit an int32."""

_PANEL, _UNIT = 64, 4
_CHANNELS_AT_ONCE = 16 * _PANEL  # quantising widens this many to fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Weight:
    """W [N, K] and b [N] of a layer as the C library reads them, alike for all instruction sets. P = ceil(N / 64).

    W[n, k] ≈ panels[n // 64, k // 4, n % 64, k % 4] · scale[n]. What lies behind N or K is zero.
    """

    panels: Tensor  # int8 [P, ceil(K / 4), 64, 4], in ±127
    scale: Tensor  # fp32 [64 P]
    start: Tensor  # int32 [64 P]: -128 · Σ of a channel's int8
    bias: Tensor  # fp32 [64 P]
    in_features: int
    out_features: int

    def plain(self) -> Tensor:
        """The int8 numbers as [N, K]."""
        rows = self.panels.transpose(1, 2).reshape(len(self.scale), -1)
        return rows[: self.out_features, : self.in_features]


def quantize_weight(weight: Tensor, bias: Tensor | None = None) -> Int8Weight:
    """Quantise W [N, K], fp32 or bf16, each output channel by its largest magnitude (symmetric, ±127).

    Raises:
        ValueError: not a matrix, or more than MAX_INPUTS inputs.
    """
    if weight.dim() != 2 or not 1 <= weight.shape[1] <= MAX_INPUTS or not len(weight):
        raise ValueError(f"weight {tuple(weight.shape)} must be [N, K] with 1 to {MAX_INPUTS} inputs")
    num_channels, num_inputs = weight.shape
    num_panels, num_units = -(-num_channels // _PANEL), -(-num_inputs // _UNIT)
    panels = torch.zeros(num_panels, num_units, _PANEL, _UNIT, dtype=torch.int8)
    scale = torch.zeros(num_panels * _PANEL)
    for first in range(0, num_channels, _CHANNELS_AT_ONCE):
        q, scales = reference.quantize(weight[first : first + _CHANNELS_AT_ONCE])
        scale[first : first + len(q)] = scales
        padded = F.pad(q, (0, num_units * _UNIT - num_inputs, 0, -len(q) % _PANEL))
        place = panels[first // _PANEL :][: len(padded) // _PANEL]
        place.copy_(padded.view(-1, _PANEL, num_units, _UNIT).transpose(1, 2))
    return Int8Weight(
        panels=panels,
        scale=scale,
        start=panels.sum(dim=(1, 3), dtype=torch.int32).view(-1).mul_(-128),
        bias=F.pad(torch.zeros(num_channels) if bias is None else bias.float(), (0, -num_channels % _PANEL)),
        in_features=num_inputs,
        out_features=num_channels,
    )


def linear_int8(x: Tensor, weight: Int8Weight) -> Tensor:
    """x Wᵀ + b as [M, N] in x's dtype, fp32 or bf16, of x [M, K] with contiguous rows.

    Each row is quantised by its own largest magnitude and summed exactly in int32, so that its result depends on the
    row alone, and is the same on every instruction set. A row that holds an infinity or NaN gives NaN.

    Raises:
        ValueError: another shape or dtype.
    """
    if x.dim() != 2 or x.shape[1] != weight.in_features or x.stride(1) != 1 or x.dtype not in DTYPES:
        raise ValueError(
            f"x {tuple(x.shape)} {x.dtype} must be [M, {weight.in_features}] in fp32 or bf16 with contiguous rows"
        )
    library = library_for(x)
    if library is None:
        n = weight.out_features
        return reference.linear_int8(x, weight.plain(), weight.scale[:n], weight.bias[:n])
    num_rows = len(x)
    out = torch.empty(num_rows, weight.out_features, dtype=x.dtype)
    rows = torch.empty(num_rows * library.int8_row_bytes(weight.in_features), dtype=torch.uint8)
    row_scale = torch.empty(num_rows)
    call = LinearInt8Call(
        x=x.data_ptr(),
        panels=weight.panels.data_ptr(),
        start=weight.start.data_ptr(),
        scale=weight.scale.data_ptr(),
        bias=weight.bias.data_ptr(),
        out=out.data_ptr(),
        rows=rows.data_ptr(),
        row_scale=row_scale.data_ptr(),
        num_rows=num_rows,
        x_stride=x.stride(0),
        in_features=weight.in_features,
        out_features=weight.out_features,
        dtype=DTYPES[x.dtype],
        threads=torch.get_num_threads(),
    )
    if not library.linear_int8(call):
        raise ValueError(f"linear_int8 does not take [{num_rows}, {weight.in_features}] × {weight.out_features}")
    return out
