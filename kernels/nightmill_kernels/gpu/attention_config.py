"""How attention is launched for which shapes: what the launches and the check without a GPU both ask."""

from dataclasses import dataclass
from functools import cache
from typing import Any

from nightmill_kernels.gpu.device_limits import DEFAULT_SHARED_LIMIT, KIB
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
    programs_per_sm: int  # of a persistent grid: as many as registers and shared memory let run at once
    wide_parts: int = 1  # in which the rows of a wide item are taken, each with all of its keys

    @property
    def max_registers(self) -> int | None:
        """Of a thread. Left alone, the assembler spills to fit a program more than shared memory has room for."""
        most = 65_536 // (32 * self.num_warps * self.programs_per_sm) // 8 * 8
        return most if most < 255 else None  # no instruction can name more


def _of(block_n: int, num_warps: int, num_stages: int, programs_per_sm: int, *, parts: int = 1) -> AttentionConfig:
    return AttentionConfig(
        block_n=block_n,
        num_warps=num_warps,
        num_stages=num_stages,
        programs_per_sm=programs_per_sm,
        wide_parts=parts,
    )


_Table = dict[int, dict[int, tuple[AttentionConfig, AttentionConfig]]]
# KiB of shared memory that a block may have: bytes of a row of K: for decodes alone, with wide items. An SM has 1 KiB
# more than a block, and each of its programs takes 1 KiB beside its own. What these come to: docs/kernels.md.
_TWO_BYTES: _Table = {
    227: {  # sm_90, sm_100
        128: (_of(64, 4, 4, 4), _of(64, 4, 4, 3)),
        256: (_of(64, 4, 3, 3), _of(64, 4, 3, 2)),
        # 64 rows of 256 sums do not fit the registers of four warps; with eight, one program fills an SM.
        512: (_of(32, 4, 3, 3), _of(32, 8, 4, 1)),
        1024: (_of(16, 4, 2, 1), _of(16, 8, 2, 1)),
    },
    163: {  # sm_80
        128: (_of(64, 4, 4, 3), _of(64, 4, 4, 2)),
        256: (_of(64, 4, 3, 2), _of(64, 4, 3, 1)),
        512: (_of(32, 4, 3, 2), _of(32, 8, 4, 1)),
        1024: (_of(16, 4, 2, 1), _of(16, 8, 2, 1, parts=2)),
    },
    99: {  # sm_86, sm_89, sm_120
        128: (_of(64, 4, 3, 2), _of(32, 4, 4, 2)),
        256: (_of(32, 4, 3, 2), _of(64, 4, 3, 1)),
        512: (_of(16, 4, 3, 2), _of(32, 8, 2, 1)),
        1024: (_of(16, 4, 2, 1), _of(16, 8, 2, 1, parts=2)),
    },
}
# fp32 products take three of tf32, with both operands twice in registers: only parts of a wide item's rows fit them.
_FOUR_BYTES: _Table = {
    227: {
        128: (_of(64, 4, 4, 4), _of(32, 4, 4, 3)),
        256: (_of(64, 4, 3, 2), _of(32, 4, 3, 2)),
        512: (_of(32, 4, 3, 2), _of(32, 8, 2, 1, parts=2)),
        1024: (_of(16, 8, 2, 1), _of(16, 8, 2, 1, parts=4)),
    },
    163: {
        128: (_of(64, 4, 4, 3), _of(32, 4, 4, 2)),
        256: (_of(64, 4, 3, 2), _of(32, 4, 3, 2)),
        512: (_of(32, 4, 3, 1), _of(32, 8, 2, 1, parts=2)),
        1024: (_of(16, 8, 2, 1), _of(16, 8, 2, 1, parts=4)),
    },
    99: {
        128: (_of(64, 4, 3, 2), _of(32, 4, 3, 2)),
        256: (_of(64, 4, 3, 1), _of(32, 4, 3, 1)),
        512: (_of(32, 4, 3, 1), _of(32, 8, 2, 1, parts=2)),
        1024: (_of(16, 8, 2, 1), _of(16, 8, 2, 1, parts=4)),
    },
}


@cache
def choose_config(
    *, head_dim: int, itemsize: int, has_wide: bool, shared_limit: int = DEFAULT_SHARED_LIMIT
) -> AttentionConfig:
    """The launch for a head size and elements of 2 bytes (bf16, fp16) or 4; reasons in docs/kernels.md.

    shared_limit: bytes that a block may have on the device, see `device_limits`.
    """
    table = _TWO_BYTES if itemsize == 2 else _FOUR_BYTES
    rows = table[next((kib for kib in table if shared_limit >= kib * KIB), min(table))]
    row_bytes = padded_dim(head_dim) * itemsize
    return rows[next((most for most in rows if row_bytes <= most), max(rows))][has_wide]


def num_programs(
    *, head_dim: int, itemsize: int, has_wide: bool, num_sms: int, shared_limit: int = DEFAULT_SHARED_LIMIT
) -> int:
    """Programs of a persistent grid, for a graph that is replayed with lists of any length."""
    config = choose_config(head_dim=head_dim, itemsize=itemsize, has_wide=has_wide, shared_limit=shared_limit)
    return num_sms * config.programs_per_sm


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
        "WIDE_M": wide_height(group) // config.wide_parts,
        "WIDE_PARTS": config.wide_parts,
        "HAS_WIDE": has_wide,
        "HAS_WINDOW": has_window,
        "HAS_SOFTCAP": has_softcap,
    }


def merge_constants(heads: int, head_dim: int) -> dict[str, Any]:
    """Compile-time constants of the merge kernel."""
    return {"HEADS": heads, "HEAD_DIM": head_dim, "PADDED_DIM": padded_dim(head_dim), "SPLIT_BLOCK": SPLIT_BLOCK}
