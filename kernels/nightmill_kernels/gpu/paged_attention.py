"""Attention of a step's work list over the page pool: one launch, and a small one that merges partial results.

FlashAttention's online softmax (Dao, 2023) in base 2, with the heads of a KV head stacked into the rows of the matrix
product. What is visible follows from positions alone, so that decodes, prefill tiles and shared prefixes are the same
code at two tile heights. The work list is drawn in docs/kernels.md.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nightmill_kernels.metadata import AttentionMetadata, AttentionWork
from nightmill_kernels.work_list import device_work, narrow_height, plan_attention, wide_height

LOG2E = 1.4426950408889634

SPLIT_BLOCK = 8
"""Partials of a row merged at once: 2,048 keys' worth."""


@triton.jit
def attention_kernel(
    q,
    k_pool,
    v_pool,
    tables,
    out,
    partial_out,
    partial_lse,
    header,
    items,
    rows,
    q_stride,
    out_stride,
    pool_stride,
    score_scale,
    softcap,
    window,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NARROW_M: tl.constexpr,
    WIDE_M: tl.constexpr,
    HAS_WIDE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Each program takes every num_programs-th (item, KV head) of the list, wide items first.

    score_scale: what turns q·k into a base-2 exponent; with a soft cap, into the exponent of its tanh (see `_scales`).
    softcap: in base 2.
    """
    programs = tl.num_programs(0)
    pid = tl.program_id(0)
    num_narrow = tl.load(header)
    table_width = tl.load(header + 3)
    first = pid
    if HAS_WIDE:
        wide_units = tl.load(header + 1) * KV_HEADS
        for unit in range(pid, wide_units, programs):
            _attend(
                unit % KV_HEADS,
                items + (num_narrow + unit // KV_HEADS) * 8,
                q,
                k_pool,
                v_pool,
                tables,
                out,
                partial_out,
                partial_lse,
                rows,
                table_width,
                q_stride,
                out_stride,
                pool_stride,
                score_scale,
                softcap,
                window,
                KV_HEADS,
                GROUP,
                HEAD_DIM,
                PADDED_DIM,
                PAGE_SIZE,
                BLOCK_N,
                WIDE_M,
                HAS_WINDOW,
                HAS_SOFTCAP,
            )
        # Go on where the wide items left off, so that no program has two more units than another.
        first = (pid + programs - wide_units % programs) % programs
    for unit in range(first, num_narrow * KV_HEADS, programs):
        _attend(
            unit % KV_HEADS,
            items + unit // KV_HEADS * 8,
            q,
            k_pool,
            v_pool,
            tables,
            out,
            partial_out,
            partial_lse,
            rows,
            table_width,
            q_stride,
            out_stride,
            pool_stride,
            score_scale,
            softcap,
            window,
            KV_HEADS,
            GROUP,
            HEAD_DIM,
            PADDED_DIM,
            PAGE_SIZE,
            BLOCK_N,
            NARROW_M,
            HAS_WINDOW,
            HAS_SOFTCAP,
        )


@triton.jit
def _attend(
    kv_head,
    item,
    q,
    k_pool,
    v_pool,
    tables,
    out,
    partial_out,
    partial_lse,
    rows,
    table_width,
    q_stride,
    out_stride,
    pool_stride,
    score_scale,
    softcap,
    window,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """One item for one KV head."""
    row_start = tl.load(item)
    num_rows = tl.load(item + 1)
    table = tables + tl.load(item + 2).to(tl.int64) * table_width
    key_start = tl.load(item + 3)
    key_end = tl.load(item + 4)
    split = tl.load(item + 5)

    lane = tl.arange(0, BLOCK_M)
    live = lane // GROUP < num_rows
    head = kv_head * GROUP + lane % GROUP
    row = rows + (row_start + lane // GROUP) * 4
    token = tl.load(row, mask=live, other=0).to(tl.int64)
    position = tl.load(row + 1, mask=live, other=-1)
    first = tl.load(row + 2, mask=live, other=-1)
    dims = tl.arange(0, PADDED_DIM)
    in_head = dims < HEAD_DIM
    rows_q = tl.load(
        q + (token * q_stride + head * HEAD_DIM)[:, None] + dims[None, :],
        mask=live[:, None] & in_head[None, :],
        other=0.0,
    )

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    for start in range(key_start, key_end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        inside = key < key_end
        # Columns past the context may hold anything; page 0 always exists.
        page = tl.load(table + key // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
        place = page * pool_stride + kv_head * (PAGE_SIZE * HEAD_DIM) + key % PAGE_SIZE * HEAD_DIM
        block = place[:, None] + dims[None, :]
        # What K holds past the end is masked as a score; V must be zero there, since 0 * NaN is NaN.
        if PADDED_DIM == HEAD_DIM:
            keys = tl.load(k_pool + block)
        else:
            keys = tl.load(k_pool + block, mask=in_head[None, :], other=0.0)
        values = tl.load(v_pool + block, mask=inside[:, None] & in_head[None, :], other=0.0)
        scores = tl.dot(rows_q, tl.trans(keys), input_precision="ieee") * score_scale
        if HAS_SOFTCAP:
            # tanh(x) = 1 - 2 / (1 + e^2x)
            scores = softcap - 2.0 * softcap / (1.0 + tl.exp2(scores))
        visible = inside[None, :] & (key[None, :] <= position[:, None])
        if HAS_WINDOW:
            visible = visible & (key[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # -inf - (-inf) is NaN: a row that has seen nothing yet keeps zeros.
        safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - safe_top[:, None])
        shrink = tl.exp2(top - safe_top)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None]
        sums = tl.dot(weights.to(values.dtype), values, sums, input_precision="ieee")
        top = new_top

    divisor = tl.where(total > 0.0, total, 1.0)
    result = sums / divisor[:, None]
    whole = live & (first < 0)
    tl.store(
        out + (token * out_stride + head * HEAD_DIM)[:, None] + dims[None, :],
        result.to(out.dtype.element_ty),
        mask=whole[:, None] & in_head[None, :],
    )
    part = live & (first >= 0)
    slot = (first + split).to(tl.int64) * (KV_HEADS * GROUP) + head
    tl.store(partial_out + (slot * HEAD_DIM)[:, None] + dims[None, :], result, mask=part[:, None] & in_head[None, :])
    lse = tl.where(total > 0.0, top + tl.log2(divisor), float("-inf"))
    tl.store(partial_lse + slot, lse, mask=part)


@triton.jit
def merge_kernel(
    partial_out,
    partial_lse,
    out,
    header,
    merges,
    out_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
):
    """One head of one entry: partials weighted by their softmax totals, in the order of the keys; none: zeros."""
    entry = tl.program_id(0)
    head = tl.program_id(1)
    if entry < tl.load(header + 2):
        token = tl.load(merges + entry * 4).to(tl.int64)
        first = tl.load(merges + entry * 4 + 1).to(tl.int64)
        count = tl.load(merges + entry * 4 + 2)
        dims = tl.arange(0, PADDED_DIM)
        in_head = dims < HEAD_DIM
        top = float("-inf")
        total = 0.0
        sums = tl.zeros([PADDED_DIM], tl.float32)
        for start in range(0, count, SPLIT_BLOCK):
            split = start + tl.arange(0, SPLIT_BLOCK)
            inside = split < count
            slot = (first + split) * HEADS + head
            lse = tl.load(partial_lse + slot, mask=inside, other=float("-inf"))
            part = tl.load(
                partial_out + (slot * HEAD_DIM)[:, None] + dims[None, :],
                mask=inside[:, None] & in_head[None, :],
                other=0.0,
            )
            new_top = tl.maximum(top, tl.max(lse, 0))
            safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = tl.exp2(lse - safe_top)
            shrink = tl.exp2(top - safe_top)
            total = total * shrink + tl.sum(weights, 0)
            sums = sums * shrink + tl.sum(part * weights[:, None], 0)
            top = new_top
        result = sums / tl.where(total > 0.0, total, 1.0)
        tl.store(out + token * out_stride + head * HEAD_DIM + dims, result.to(out.dtype.element_ty), mask=in_head)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """What of a launch is chosen, not given."""

    block_n: int  # keys of an iteration
    num_warps: int
    num_stages: int  # iterations in flight
    programs_per_sm: int  # of a persistent grid: as many as registers and shared memory let run at once


def choose_config(*, padded_dim: int, itemsize: int, has_wide: bool) -> AttentionConfig:
    """The launch for a head size, in bytes 2 (bf16, fp16) or 4 an element."""
    row_bytes = padded_dim * itemsize
    block_n = 64 if row_bytes <= 256 else 32
    return AttentionConfig(block_n=block_n, num_warps=4, num_stages=3 if row_bytes <= 256 else 2, programs_per_sm=2)


def paged_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    meta: AttentionMetadata,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    out: Tensor,
) -> Tensor:
    """Fill `out` [T, H, D]; see the wrapper for the contract.

    Without `meta.work` for this window the list is planned here, which waits for the device: single calls, tests.
    """
    work = meta.work.get(window)
    if work is None:
        work = build_work(q, k_pool, meta, window)
    kv_heads, page_size, head_dim = k_pool.shape[1:]
    group = q.shape[1] // kv_heads
    padded_dim = triton.next_power_of_2(max(head_dim, 16))
    config = choose_config(padded_dim=padded_dim, itemsize=q.element_size(), has_wide=work.has_wide)
    score_scale, cap = _scales(scale, softcap)
    if work.num_programs:
        attention_kernel[(work.num_programs,)](
            q,
            k_pool,
            v_pool,
            meta.page_tables,
            out,
            work.partial_out,
            work.partial_lse,
            work.header,
            work.items,
            work.rows,
            q.stride(0),
            out.stride(0),
            k_pool.stride(0),
            score_scale,
            cap,
            window or 0,
            KV_HEADS=kv_heads,
            GROUP=group,
            HEAD_DIM=head_dim,
            PADDED_DIM=padded_dim,
            PAGE_SIZE=page_size,
            BLOCK_N=config.block_n,
            NARROW_M=narrow_height(group),
            WIDE_M=wide_height(group),
            HAS_WIDE=work.has_wide,
            HAS_WINDOW=window is not None,
            HAS_SOFTCAP=softcap is not None,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    if work.merges.shape[0]:
        merge_kernel[(work.merges.shape[0], q.shape[1])](
            work.partial_out,
            work.partial_lse,
            out,
            work.header,
            work.merges,
            out.stride(0),
            HEADS=q.shape[1],
            HEAD_DIM=head_dim,
            PADDED_DIM=padded_dim,
            SPLIT_BLOCK=SPLIT_BLOCK,
            num_warps=1,
        )
    return out


def num_programs(*, head_dim: int, itemsize: int, has_wide: bool, num_sms: int) -> int:
    """Programs of a persistent grid, for a graph that is replayed with lists of any length."""
    padded_dim = triton.next_power_of_2(max(head_dim, 16))
    return num_sms * choose_config(padded_dim=padded_dim, itemsize=itemsize, has_wide=has_wide).programs_per_sm


@dataclass(frozen=True, slots=True)
class _HostGroups:
    starts: Any
    sequences: Any
    num_pages: Any


def build_work(q: Tensor, k_pool: Tensor, meta: AttentionMetadata, window: int | None) -> AttentionWork:
    """The step's work list from its metadata: several device-to-host copies, so not for the steps of an engine.

    Raises ValueError: a prefix group's sequences do not have the same pages.
    """
    groups = None
    if meta.groups is not None:
        groups = _HostGroups(
            *(x.cpu().numpy() for x in (meta.groups.starts, meta.groups.sequences, meta.groups.num_pages))
        )
        _check_tables(groups, meta.page_tables.cpu().numpy())
    heads, head_dim = q.shape[1:]
    kv_heads, page_size = k_pool.shape[1:3]
    plan = plan_attention(
        meta.query_starts.cpu().numpy(),
        meta.context_lens.cpu().numpy(),
        groups,
        num_tokens=q.shape[0],
        group_size=heads // kv_heads,
        page_size=page_size,
        table_width=meta.page_tables.shape[1],
        window=window,
    )
    return device_work(
        plan,
        lambda array: torch.from_numpy(array).to(q.device),
        torch.empty(plan.num_partials, heads, head_dim, dtype=torch.float32, device=q.device),
        torch.empty(plan.num_partials, heads, dtype=torch.float32, device=q.device),
        num_programs=plan.num_items * kv_heads,
    )


def _check_tables(groups: _HostGroups, tables: Any) -> None:
    for first, last, pages in zip(groups.starts[:-1], groups.starts[1:], groups.num_pages, strict=True):
        shared = tables[groups.sequences[first:last], :pages]
        if len(shared) and (shared != shared[0]).any():
            raise ValueError("paged_attention: a prefix group's sequences must have the same first pages")


def _scales(scale: float, softcap: float | None) -> tuple[float, float]:
    """(score_scale, softcap) of the kernel: scores as exponents of 2."""
    if softcap is None:
        return scale * LOG2E, 0.0
    return 2.0 * scale / softcap * LOG2E, softcap * LOG2E
