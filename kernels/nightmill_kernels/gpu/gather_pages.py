"""Moving pages in Triton: a program copies a piece of one page of one plane, as words that nothing looks into."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from nightmill_kernels.gpu.spec import KernelSpec

_PLAIN = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WORD_BYTES = 4


@cache
def plan_gather(page_words: int) -> tuple[int, int]:
    """(words of a program, its warps): 64 bytes a thread, up to 16 KB of int32."""
    block = min(4096, triton.next_power_of_2(page_words))
    return block, max(1, block // 512)


@triton.jit(do_not_specialize=["planes"])
def _move_pages(
    pool, staging, pages, planes, plane_stride, page_stride, WORDS: tl.constexpr, BLOCK: tl.constexpr, OUT: tl.constexpr
):
    pieces: tl.constexpr = (WORDS + BLOCK - 1) // BLOCK
    copied = tl.program_id(0) // pieces  # page-major, as staging is
    word = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)
    page = tl.load(pages + copied // planes)  # int64
    in_pool = pool + page * page_stride + (copied % planes).to(tl.int64) * plane_stride + word
    in_staging = staging + copied.to(tl.int64) * WORDS + word
    mask = word < WORDS
    if OUT:
        tl.store(in_staging, tl.load(in_pool, mask), mask)
    else:
        tl.store(in_pool, tl.load(in_staging, mask), mask)


def gather_pages(pool: Tensor, pages: Tensor, out: Tensor) -> None:
    """out [n, planes, …page] = pages of pool [planes, N, …page], each of them in one piece."""
    _move(pool, pages, out, out=True)


def scatter_pages(staging: Tensor, pages: Tensor, pool: Tensor) -> None:
    """The inverse of `gather_pages`."""
    _move(pool, pages, staging, out=False)


def _move(pool: Tensor, pages: Tensor, staging: Tensor, *, out: bool) -> None:
    held, copied = _as_words(pool.flatten(2), staging.flatten(2))
    planes, _, page_words = held.shape
    block, num_warps = plan_gather(page_words)
    _move_pages[(len(pages) * planes * triton.cdiv(page_words, block),)](
        held,
        copied,
        pages,
        planes,
        held.stride(0),
        held.stride(1),
        WORDS=page_words,
        BLOCK=block,
        OUT=out,
        num_warps=num_warps,
    )


def _as_words(*tensors: Tensor) -> list[Tensor]:
    """The same bytes as int32 where all of them are made of such words, else as integers of the element's size."""
    size = tensors[0].element_size()
    per_word = max(1, _WORD_BYTES // size)
    fits = all(n % per_word == 0 for x in tensors for n in (x.shape[2], x.stride(0), x.stride(1), x.storage_offset()))
    return [x.view(torch.int32 if fits and size < _WORD_BYTES else _PLAIN[size]) for x in tensors]


def specs() -> list[KernelSpec]:
    """Pages of 16 tokens: Qwen3 and Llama 8B (8 heads of 128), SmolLM2 (3 of 64), Gemma 3 1B (1 of 256)."""
    return [_spec(words, out) for words in (8192, 1536, 2048) for out in (True, False)]


def _spec(words: int, out: bool) -> KernelSpec:
    block, num_warps = plan_gather(words)
    return KernelSpec(
        stem="gather_pages",
        config=f"{'gather' if out else 'scatter'} {words} words",
        kernel=_move_pages,
        signature={
            "pool": "*i32",
            "staging": "*i32",
            "pages": "*i64",
            "planes": "i32",
            "plane_stride": "i64",
            "page_stride": "i32",
        },
        constants={"WORDS": words, "BLOCK": block, "OUT": out},
        divisible=frozenset(("pool", "staging", "pages", "plane_stride", "page_stride")),
        num_warps=num_warps,
        num_stages=3,
    )
