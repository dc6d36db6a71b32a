"""Gated activations in Triton: a program computes a piece of one row."""

from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from nightmill_kernels.gpu.spec import KernelSpec

_WIDEST = 2048


@cache
def plan_gated_mul(length: int) -> tuple[int, int]:
    """(columns of a program, its warps): a piece that divides the row where there is one, 16 elements a thread."""
    columns = _WIDEST
    while columns > 256 and length % columns:
        columns //= 2
    if length % columns:
        columns = min(1024, triton.next_power_of_2(length))
    return columns, max(1, columns // 512)


@triton.jit
def _gated_mul(gate_up, out, stride, LENGTH: tl.constexpr, COLUMNS: tl.constexpr, GELU: tl.constexpr):
    pieces: tl.constexpr = (LENGTH + COLUMNS - 1) // COLUMNS
    row = (tl.program_id(0) // pieces).to(tl.int64)
    column = tl.program_id(0) % pieces * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < LENGTH
    at = gate_up + row * stride + column
    gate = tl.load(at, mask, other=0.0).to(tl.float32)
    up = tl.load(at + LENGTH, mask, other=0.0).to(tl.float32)
    bend = gate
    if GELU:
        # 0.5 · (1 + tanh(u)) = sigmoid(2u), and u = sqrt(2 / pi) · (x + 0.044715 x³).
        bend = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    result = gate * tl.sigmoid(bend) * up
    tl.store(out + row * LENGTH + column, result.to(out.dtype.element_ty), mask)


def gated_mul(gate_up: Tensor, out: Tensor, *, gelu: bool) -> None:
    """out [T, F], contiguous, of gate_up [T, 2F] with dense rows."""
    num_rows, length = out.shape
    columns, num_warps = plan_gated_mul(length)
    _gated_mul[(num_rows * triton.cdiv(length, columns),)](
        gate_up, out, gate_up.stride(0), LENGTH=length, COLUMNS=columns, GELU=gelu, num_warps=num_warps
    )


def specs() -> list[KernelSpec]:
    """Feed-forward sizes of the models that are measured, and of one whose rows no piece divides."""
    return [
        _spec(length, gelu)
        for length, gelu in ((1536, False), (3072, False), (14336, False), (6912, True), (9216, True), (4300, False))
    ]


def _spec(length: int, gelu: bool) -> KernelSpec:
    columns, num_warps = plan_gated_mul(length)
    pointers = ("gate_up", "out")
    return KernelSpec(
        stem="gated_mul",
        config=f"{'gelu' if gelu else 'silu'} F{length}",
        kernel=_gated_mul,
        signature={"gate_up": "*bf16", "out": "*bf16", "stride": "i32"},
        constants={"LENGTH": length, "COLUMNS": columns, "GELU": gelu},
        divisible=frozenset(pointers if length % 8 else (*pointers, "stride")),
        num_warps=num_warps,
        num_stages=3,
    )
