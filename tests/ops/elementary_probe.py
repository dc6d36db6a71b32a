"""Kernels that store what the building blocks of a draw compute."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nightmill_kernels.gpu.elementary import gumbel, gumbel_at, log, weight


@triton.jit
def _gumbel_rows(seed, position, out, BLOCK: tl.constexpr):
    row, token = tl.program_id(0), tl.arange(0, BLOCK)
    tl.store(out + row * BLOCK + token, gumbel_at(token, tl.load(seed + row), tl.load(position + row)))


@triton.jit
def _apply(x, out, WHAT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at)
    if WHAT == "gumbel":
        tl.store(out + at, gumbel(value.to(tl.uint32, bitcast=True)))
    elif WHAT == "log":
        tl.store(out + at, log(value))
    else:
        tl.store(out + at, weight(value))


def gumbel_rows(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    out = torch.empty(len(seeds), vocab, device=seeds.device)
    _gumbel_rows[(len(seeds),)](seeds, positions, out, BLOCK=vocab, enable_fp_fusion=False)
    return out


def _applied(x: Tensor, what: str, dtype: torch.dtype) -> Tensor:
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    _apply[(len(x) // 2048,)](x, out, WHAT=what, BLOCK=2048, enable_fp_fusion=False)
    return out


def gumbel_of(words: Tensor) -> Tensor:
    return _applied(words, "gumbel", torch.float32)


def log_of(x: Tensor) -> Tensor:
    return _applied(x, "log", torch.float32)


def weight_of(x: Tensor) -> Tensor:
    return _applied(x, "weight", torch.int64)
