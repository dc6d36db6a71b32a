"""RMS norm in Triton: a program normalises one wide row, or several narrow ones (heads)."""

from dataclasses import dataclass
from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from nightmill_kernels.gpu.spec import KernelSpec

_TILE = 1024
"""Elements of a program's tile where rows are narrower: 16 a thread, two 16-byte loads in bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormTile:
    """How rows are cut into programs."""

    rows: int
    columns: int  # a power of two that holds a row
    num_warps: int


@cache
def plan_norm(row_length: int) -> NormTile:
    """The tile for rows of this length."""
    columns = triton.next_power_of_2(row_length)
    rows = max(1, _TILE // columns)
    return NormTile(rows=rows, columns=columns, num_warps=min(16, max(1, rows * columns // 512)))


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm(
    x,
    residual,
    weight,
    out,
    num_rows,
    x_stride,
    out_stride,
    eps,
    weight_offset,
    HEADS: tl.constexpr,
    LENGTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    mask = (row < num_rows)[:, None] & (column < LENGTH)[None, :]
    token, head = (row // HEADS).to(tl.int64), row % HEADS
    within = (head * LENGTH)[:, None] + column[None, :]
    factor = tl.load(weight + column, column < LENGTH, other=0.0).to(tl.float32) + weight_offset
    wide = tl.load(x + (token * x_stride)[:, None] + within, mask, other=0.0).to(tl.float32)
    if residual is not None:
        # The sum is rounded before it is normalised: what the next layer adds to is what this one saw.
        at = residual + (token * LENGTH)[:, None] + within
        total = (wide + tl.load(at, mask, other=0.0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(at, total, mask)
        wide = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / LENGTH + eps)
    normed = wide * scale[:, None] * factor[None, :]
    tl.store(out + (token * out_stride)[:, None] + within, normed.to(out.dtype.element_ty), mask)


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, eps: float, weight_offset: float) -> None:
    """out = norm(x) or, with a residual (contiguous [T, F]), residual += x and out = norm(residual).

    x and out [T, F], or [T, H, D] with dense heads; out may be x.
    """
    length = x.shape[-1]
    heads = 1 if x.dim() == 2 else x.shape[1]
    num_rows = x.shape[0] * heads
    tile = plan_norm(length)
    _rms_norm[(triton.cdiv(num_rows, tile.rows),)](
        x,
        residual,
        weight,
        out,
        num_rows,
        x.stride(0),
        out.stride(0),
        eps,
        weight_offset,
        HEADS=heads,
        LENGTH=length,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        num_warps=tile.num_warps,
    )


def specs() -> list[KernelSpec]:
    """Norms of hidden states with and without the residual, and over all heads of a token."""
    wide = [_spec(length, 1, adds) for length in (576, 1024, 1152, 4096) for adds in (False, True)]
    return [*wide, _spec(128, 8, False), _spec(2048, 1, False)]


def _spec(length: int, heads: int, adds: bool) -> KernelSpec:
    tile = plan_norm(length)
    pointers = ("x", "residual", "weight", "out") if adds else ("x", "weight", "out")
    return KernelSpec(
        stem="rms_norm",
        config=f"{'add ' if adds else ''}F{length}" + (f" H{heads}" if heads > 1 else ""),
        kernel=_rms_norm,
        signature=dict.fromkeys(pointers, "*bf16")
        | {"num_rows": "i32", "x_stride": "i32", "out_stride": "i32", "eps": "fp32", "weight_offset": "fp32"},
        constants={"HEADS": heads, "LENGTH": length, "ROWS": tile.rows, "COLUMNS": tile.columns}
        | ({} if adds else {"residual": None}),
        divisible=frozenset((*pointers, "x_stride", "out_stride")),
        num_warps=tile.num_warps,
        num_stages=3,
    )
