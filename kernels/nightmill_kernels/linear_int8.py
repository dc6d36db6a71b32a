"""Linear layers in int8: weights have a scale for each output channel, rows as they come one for every 32 inputs."""

from ctypes import addressof
from dataclasses import dataclass

import torch
from torch import Tensor

from nightmill_kernels.backend import library_for
from nightmill_kernels.cpu.huge_pages import packed_memory
from nightmill_kernels.cpu.library import DTYPES, Int8Call, Int8Layer
from nightmill_kernels.gated_mul import Gate, gated_mul
from nightmill_kernels.reference import linear_int8 as reference

_PANEL, _UNIT, _TURN = 64, 4, 16
_OFFSET = 128  # the C library multiplies unsigned by signed numbers
_COLUMNS_AT_ONCE = 16 * _PANEL  # quantising widens this many to fp32
_NO_GATE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Weight:
    """W [N, K] and b [N] of a layer as the C library reads them, whatever the instruction set: P panels of 64 columns.

    With `row = order[column]`: W[row, k] ≈ (panels[column // 64, k // 4, column % 64, k % 4] - 128) · scale[column].
    What lies behind K, and columns of no row (-1), are zero.
    """

    panels: Tensor  # uint8 [P, 8 · ceil(K / 32), 64, 4]: a number in ±127, + 128
    scale: Tensor  # fp32 [64 P]
    bias: Tensor  # fp32 [64 P]
    order: Tensor  # int64 [64 P]: which row of W a column is; in turns of 16 where there is a gate
    inputs: int
    outputs: int  # N, or half of it with a gate
    gate: Gate | None
    layer: Int8Layer  # the same for C: addresses

    @property
    def nbytes(self) -> int:
        """What all of it takes."""
        return sum(tensor.nbytes for tensor in (self.panels, self.scale, self.bias, self.order))

    def plain(self) -> tuple[Tensor, Tensor, Tensor]:
        """W as int8 [N, K], scales and biases fp32 [N]."""
        columns = self.order.argsort(stable=True)[int((self.order < 0).sum()) :]
        weight = self.panels.transpose(1, 2).reshape(len(self.order), -1)[:, : self.inputs]
        numbers = (weight[columns].short() - _OFFSET).to(torch.int8)
        return numbers, self.scale[columns], self.bias[columns]


def quantize_weight(weight: Tensor, bias: Tensor | None = None, gate: Gate | None = None) -> Int8Weight:
    """Quantise W [N, K], fp32 or bf16, each output channel by its largest magnitude (symmetric, ±127).

    Args:
        weight: Under a gate the first half of the rows is the gate's.
        bias: [N] or None.
        gate: What the layer does with its two halves.

    Raises:
        ValueError: no such matrix.
    """
    if weight.dim() != 2 or not weight.numel() or (gate and len(weight) % 2):
        raise ValueError(f"weight {tuple(weight.shape)} must be [N, K], with an even N under a gate")
    num_rows, inputs = weight.shape
    order = _column_order(num_rows, gate)
    num_panels, num_units = len(order) // _PANEL, -(-inputs // reference.GROUP) * reference.GROUP // _UNIT
    panels = packed_memory(num_panels * num_units * _PANEL * _UNIT).view(num_panels, num_units, _PANEL, _UNIT)
    scale, biases = torch.zeros(len(order)), torch.zeros(len(order))
    for first in range(0, len(order), _COLUMNS_AT_ONCE):
        rows = order[first : first + _COLUMNS_AT_ONCE]
        q = torch.zeros(len(rows), num_units * _UNIT, dtype=torch.int8)
        is_row = (rows >= 0).nonzero().squeeze(1)
        rows, columns = rows[is_row], is_row + first
        q[is_row, :inputs], scale[columns] = reference.quantize(weight[rows])
        unsigned = (q.short() + _OFFSET).to(torch.uint8)
        panels[first // _PANEL :][: len(q) // _PANEL] = unsigned.view(-1, _PANEL, num_units, _UNIT).transpose(1, 2)
        if bias is not None:
            biases[columns] = bias[rows].float()
    outputs = num_rows if gate is None else num_rows // 2
    return Int8Weight(
        panels=panels,
        scale=scale,
        bias=biases,
        order=order,
        inputs=inputs,
        outputs=outputs,
        gate=gate,
        layer=Int8Layer(
            panels=panels.data_ptr(),
            scale=scale.data_ptr(),
            bias=biases.data_ptr(),
            outputs=outputs,
            inputs=inputs,
            gate=_NO_GATE if gate is None else gate.value,
        ),
    )


def linear_int8(x: Tensor, weight: Int8Weight, out: Tensor | None = None) -> Tensor:
    """x Wᵀ + b as [M, N] in x's dtype, fp32 or bf16, of x [M, K] with contiguous rows; gated, [M, N / 2].

    Every 32 inputs of a row are quantised by their own largest magnitude. Sums have a fixed order, so that a row's
    result depends on the row alone, and is the same on every instruction set up to the gate. A row that holds an
    infinity or NaN gives NaN.

    Raises:
        ValueError: another shape or dtype.
    """
    if x.dim() != 2 or x.shape[1] != weight.inputs or x.stride(1) != 1 or x.dtype not in DTYPES:
        raise ValueError(
            f"x {tuple(x.shape)} {x.dtype} must be [M, {weight.inputs}] in fp32 or bf16 with contiguous rows"
        )
    shape = (len(x), weight.outputs)
    if out is None:
        out = torch.empty(shape, dtype=x.dtype)
    elif out.shape != shape or out.dtype != x.dtype or not out.is_contiguous():
        raise ValueError(f"out {tuple(out.shape)} {out.dtype} must be {x.dtype} {shape}, contiguous")
    library = library_for(x)
    if library is None:
        result = reference.linear_int8(x, *weight.plain())
        return out.copy_(result if weight.gate is None else gated_mul(result, weight.gate))
    call = Int8Call(
        addressof(weight.layer),
        x.data_ptr(),
        out.data_ptr(),
        x.stride(0),
        len(x),
        DTYPES[x.dtype],
        torch.get_num_threads(),
    )
    if not library.linear_int8(call):
        raise ValueError(f"linear_int8 does not take [{len(x)}, {weight.inputs}] × {weight.outputs}")
    return out


def _column_order(num_rows: int, gate: Gate | None) -> Tensor:
    """[64 P] which row each column is, -1: none."""
    if gate is None:
        order = torch.arange(num_rows)
    else:
        half = num_rows // 2
        features = torch.arange(-(-half // _TURN) * _TURN)
        features[half:] = -1
        both = torch.stack((features, torch.where(features < 0, -1, features + half)))
        order = both.view(2, -1, _TURN).transpose(0, 1).reshape(-1)
    return torch.nn.functional.pad(order, (0, -len(order) % _PANEL), value=-1)
