"""How attention is launched for which shapes: what the launches and the check without a GPU both ask."""

from dataclasses import dataclass
from typing import Any

from nightmill_kernels.work_list import narrow_height, wide_height

SPLIT_BLOCK = 8
"""Partials of a row merged at once: 2,048 keys' worth."""

MERGE_WARPS, MERGE_STAGES = 1, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """What of a launch is chosen, not given."""

    block_n: int  # keys of an iteration; divides BLOCK_KEYS
    num_warps: int
    num_stages: int  # one more than the blocks of K and V that are in flight
    programs_per_sm: int  # of a persistent grid: as many as registers and shared memory of sm_90 let run at once

    @property
    def max_registers(self) -> int | None:
        """Of a thread. Left alone, the assembler spills to fit a program more than shared memory has room for."""
        most = 65_536 // (32 * self.num_warps * self.programs_per_sm) // 8 * 8
        return most if most < 255 else None  # no instruction can name more


def choose_config(*, head_dim: int, itemsize: int, has_wide: bool) -> AttentionConfig:
    """The launch for a head size and elements of 2 bytes (bf16, fp16) or 4; reasons in docs/kernels.md."""
    row_bytes = padded_dim(head_dim) * itemsize
    if row_bytes <= 128:
        return AttentionConfig(block_n=64, num_warps=4, num_stages=4, programs_per_sm=3 if has_wide else 4)
    if row_bytes <= 256:
        return AttentionConfig(block_n=64, num_warps=4, num_stages=3, programs_per_sm=2 if has_wide else 3)
    if row_bytes <= 512:
        if has_wide and itemsize == 2:
            # 64 rows of 256 sums do not fit the registers of four warps; with eight, one program fills an SM.
            return AttentionConfig(block_n=32, num_warps=8, num_stages=4, programs_per_sm=1)
        return AttentionConfig(block_n=32, num_warps=4, num_stages=3, programs_per_sm=1 if has_wide else 3)
    return AttentionConfig(block_n=16, num_warps=8 if has_wide else 4, num_stages=2, programs_per_sm=1)


def num_programs(*, head_dim: int, itemsize: int, has_wide: bool, num_sms: int) -> int:
    """Programs of a persistent grid, for a graph that is replayed with lists of any length."""
    return num_sms * choose_config(head_dim=head_dim, itemsize=itemsize, has_wide=has_wide).programs_per_sm


def padded_dim(head_dim: int) -> int:
    """Columns of the matrix products: a power of two."""
    return 1 << (max(head_dim, 16) - 1).bit_length()


def attention_constants(
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    has_wide: bool,
    has_window: bool,
    has_softcap: bool,
    config: AttentionConfig,
) -> dict[str, Any]:
    """Compile-time constants of the attention kernel."""
    group = heads // kv_heads
    return {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": padded_dim(head_dim),
        "PAGE_SIZE": page_size,
        "BLOCK_N": config.block_n,
        "NARROW_M": narrow_height(group),
        "WIDE_M": wide_height(group),
        "HAS_WIDE": has_wide,
        "HAS_WINDOW": has_window,
        "HAS_SOFTCAP": has_softcap,
    }


def merge_constants(heads: int, head_dim: int) -> dict[str, Any]:
    """Compile-time constants of the merge kernel."""
    return {"HEADS": heads, "HEAD_DIM": head_dim, "PADDED_DIM": padded_dim(head_dim), "SPLIT_BLOCK": SPLIT_BLOCK}
