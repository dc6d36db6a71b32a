"""Greedy choice in Triton: programs reduce pieces of a row to a key each, then one a row takes the largest key."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nightmill_kernels.gpu.spec import KernelSpec

_COLUMNS, _WARPS = 8192, 8
"""16 KB of bf16 logits a program: one row of 150,000 is 19 programs, and 8 fit on a multiprocessor."""


@triton.jit
def _piece_keys(logits, keys, stride, VOCAB: tl.constexpr, COLUMNS: tl.constexpr):
    pieces: tl.constexpr = (VOCAB + COLUMNS - 1) // COLUMNS
    row = (tl.program_id(0) // pieces).to(tl.int64)
    column = tl.program_id(0) % pieces * COLUMNS + tl.arange(0, COLUMNS)
    value = tl.load(logits + row * stride + column, column < VOCAB, other=float("-inf")).to(tl.float32)
    value = tl.where(value != value, float("inf"), value)  # both mean that the row has no finite largest logit
    top = tl.max(value, 0)
    first = tl.min(tl.where(value == top, column, VOCAB), 0)
    # Bits of floats ascend like integers once those of negative ones are turned; 0 and -0 tie.
    bits = tl.where(top == 0.0, 0.0, top).to(tl.int32, bitcast=True)
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    tl.store(keys + tl.program_id(0), (ascending.to(tl.int64) << 32) | (0x7FFFFFFF - first))


@triton.jit
def _best_key(keys, out, PIECES: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    piece = tl.arange(0, BLOCK)
    least: tl.constexpr = -(2**63)
    best = tl.max(tl.load(keys + row.to(tl.int64) * PIECES + piece, piece < PIECES, other=least), 0)
    top = best >> 32
    is_finite = (top > -0x7F800001) & (top < 0x7F800000)
    tl.store(out + row, tl.where(is_finite, 0x7FFFFFFF - (best & 0x7FFFFFFF), -1).to(tl.int32))


def argmax(logits: Tensor, out: Tensor) -> None:
    """Write out int32 [R] of logits [R, V] with dense rows."""
    num_rows, vocab = logits.shape
    pieces = triton.cdiv(vocab, _COLUMNS)
    keys = torch.empty(num_rows * pieces, dtype=torch.int64, device=logits.device)
    _piece_keys[(num_rows * pieces,)](logits, keys, logits.stride(0), VOCAB=vocab, COLUMNS=_COLUMNS, num_warps=_WARPS)
    _best_key[(num_rows,)](keys, out, PIECES=pieces, BLOCK=triton.next_power_of_2(pieces), num_warps=1)


def specs() -> list[KernelSpec]:
    """Vocabularies of the models that are measured, in bf16, and of Gemma, whose logits are fp32."""
    cases = (("bf16", 49152), ("bf16", 128256), ("bf16", 151936), ("fp32", 262144))
    return [spec for dtype, vocab in cases for spec in _specs(dtype, vocab)]


def _specs(dtype: str, vocab: int) -> list[KernelSpec]:
    pieces = triton.cdiv(vocab, _COLUMNS)
    return [
        KernelSpec(
            stem="argmax",
            config=f"pieces {dtype} V{vocab}",
            kernel=_piece_keys,
            signature={"logits": f"*{dtype}", "keys": "*i64", "stride": "i32"},
            constants={"VOCAB": vocab, "COLUMNS": _COLUMNS},
            divisible=frozenset(("logits", "keys", "stride")),
            num_warps=_WARPS,
            num_stages=3,
        ),
        KernelSpec(
            stem="argmax",
            config=f"rows {dtype} V{vocab}",
            kernel=_best_key,
            signature={"keys": "*i64", "out": "*i32"},
            constants={"PIECES": pieces, "BLOCK": triton.next_power_of_2(pieces)},
            divisible=frozenset(("keys", "out")),
            num_warps=1,
            num_stages=3,
        ),
    ]
