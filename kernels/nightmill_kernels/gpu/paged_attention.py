"""Attention of a step's work list over the page pool: one launch, and a small one that merges partial results.

FlashAttention's online softmax (Dao, 2023) in base 2, with the heads of a KV head stacked into the rows of the matrix
product. What is visible follows from positions alone, so that decodes, prefill tiles and shared prefixes are the same
code at two tile heights. The work list is drawn in docs/kernels.md.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from nightmill_kernels.gpu import device_limits
from nightmill_kernels.gpu.attention_config import (
    MERGE_STAGES,
    MERGE_WARPS,
    AttentionConfig,
    attention_constants,
    choose_config,
    merge_constants,
)
from nightmill_kernels.gpu.spec import KernelSpec
from nightmill_kernels.metadata import AttentionMetadata, AttentionWork
from nightmill_kernels.work_list import device_work, plan_attention

LOG2E = 1.4426950408889634


# One build for all windows: it is only compared with.
@triton.jit(do_not_specialize=["window"])
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
    WIDE_PARTS: tl.constexpr,
    HAS_WIDE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Each program takes every num_programs-th (item, part of its rows, KV head) of the list, wide items first.

    A wide item has WIDE_PARTS parts of WIDE_M rows, others have one.

    score_scale: what turns q·k into a base-2 exponent; with a soft cap, into the exponent of its tanh (see `_scales`).
    softcap: in base 2.
    """
    programs = tl.num_programs(0)
    pid = tl.program_id(0)
    first = pid
    if HAS_WIDE:
        wide_units = tl.load(header + 1) * (KV_HEADS * WIDE_PARTS)
        for unit in range(pid, wide_units, programs):
            _attend(
                unit % KV_HEADS,
                items + (tl.load(header, volatile=True) + unit // (KV_HEADS * WIDE_PARTS)) * 8,
                unit // KV_HEADS % WIDE_PARTS * WIDE_M,
                q,
                k_pool,
                v_pool,
                tables,
                out,
                partial_out,
                partial_lse,
                rows,
                header,
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
                False,
                HAS_WINDOW,
                HAS_SOFTCAP,
            )
        # Go on where the wide items left off, so that no program has two more units than another.
        first = (pid + programs - wide_units % programs) % programs
    for unit in range(first, tl.load(header, volatile=True) * KV_HEADS, programs):
        _attend(
            unit % KV_HEADS,
            items + unit // KV_HEADS * 8,
            0,
            q,
            k_pool,
            v_pool,
            tables,
            out,
            partial_out,
            partial_lse,
            rows,
            header,
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
            True,
            HAS_WINDOW,
            HAS_SOFTCAP,
        )


@triton.jit
def _attend(
    kv_head,
    item,
    first_lane,
    q,
    k_pool,
    v_pool,
    tables,
    out,
    partial_out,
    partial_lse,
    rows,
    header,
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
    ONE_ROW: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """One item for one KV head. ONE_ROW: the row is of a decode and sees all keys of the item, but for a window.

    first_lane: of the item's rows x heads, the first that is computed here; BLOCK_M are.
    Loads are volatile where a value that is at hand would otherwise stand in a register for a whole loop.
    """
    table = tables + tl.load(item + 2).to(tl.int64) * tl.load(header + 3, volatile=True)
    key_start = tl.load(item + 3)
    key_end = tl.load(item + 4)

    lane = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, PADDED_DIM)
    in_head = dims < HEAD_DIM
    if ONE_ROW:
        live = lane < GROUP
        row = rows + tl.load(item) * 4
        token = tl.load(row).to(tl.int64)
        position = tl.load(row + 1)
        head = kv_head * GROUP + lane
    else:
        # The 0 that items end with: a lane that depends on the item is not computed before the loop over items, where
        # its quotients and heads would stand in registers throughout.
        lane = lane + (first_lane + tl.load(item + 7))
        live = lane // GROUP < tl.load(item + 1)
        row = rows + (tl.load(item) + lane // GROUP) * 4
        token = tl.load(row, mask=live, other=0).to(tl.int64)
        position = tl.load(row + 1, mask=live, other=-1)[:, None]
        head = kv_head * GROUP + lane % GROUP
    rows_q = tl.load(
        q + (token * q_stride + head * HEAD_DIM)[:, None] + dims[None, :],
        mask=live[:, None] & in_head[None, :],
        other=0.0,
    )

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    k_head = k_pool + kv_head * (PAGE_SIZE * HEAD_DIM)
    v_head = v_pool + kv_head * (PAGE_SIZE * HEAD_DIM)
    # Columns past the context may hold anything; page 0 always exists.
    if PAGE_SIZE % BLOCK_N == 0:
        page = tl.load(table + key_start // PAGE_SIZE, mask=key_start < key_end, other=0)
    else:
        first_key = key_start + tl.arange(0, BLOCK_N)
        page = tl.load(table + first_key // PAGE_SIZE, mask=first_key < key_end, other=0)
    for start in range(key_start, key_end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        inside = key < key_end
        place = page.to(tl.int64) * pool_stride + key % PAGE_SIZE * HEAD_DIM
        block = place[:, None] + dims[None, :]
        # A block ahead, so that K and V never wait for their page ids.
        if PAGE_SIZE % BLOCK_N == 0:
            page = tl.load(table + (start + BLOCK_N) // PAGE_SIZE, mask=start + BLOCK_N < key_end, other=0)
        else:
            next_key = key + BLOCK_N
            page = tl.load(table + next_key // PAGE_SIZE, mask=next_key < key_end, other=0)
        # What K holds past the end is masked as a score; V must be zero there, since 0 * NaN is NaN.
        if PADDED_DIM == HEAD_DIM:
            keys = tl.load(k_head + block)
        else:
            keys = tl.load(k_head + block, mask=in_head[None, :], other=0.0)
        values = tl.load(v_head + block, mask=inside[:, None] & in_head[None, :], other=0.0)
        scores = tl.dot(rows_q, tl.trans(keys), input_precision="tf32x3") * score_scale
        if HAS_SOFTCAP:
            # tanh(x) = 1 - 2 / (1 + e^2x)
            scores = softcap - 2.0 * softcap / (1.0 + tl.exp2(scores))
        visible = inside[None, :]
        if not ONE_ROW:
            visible = visible & (key[None, :] <= position)
        if HAS_WINDOW:
            visible = visible & (key[None, :] > position - window)
        scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # -inf - (-inf) is NaN: a row that has seen nothing yet keeps zeros.
        safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - safe_top[:, None])
        shrink = tl.exp2(top - safe_top)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None]
        sums = tl.dot(weights.to(values.dtype), values, sums, input_precision="tf32x3")
        top = new_top

    divisor = tl.where(total > 0.0, total, 1.0)
    result = sums / divisor[:, None]
    # Read again: kept through the loop they would cost it registers. The rows of an item are alike: whole or parts.
    row_start = tl.load(item, volatile=True)
    first_row = rows + row_start * 4
    lane = tl.arange(0, BLOCK_M) + (first_lane + tl.load(item + 7, volatile=True))
    head = kv_head * GROUP + lane % GROUP
    if ONE_ROW:
        entry = first_row + lane * 0
        stored = lane < GROUP
    else:
        entry = first_row + lane // GROUP * 4
        stored = lane // GROUP < tl.load(item + 1, volatile=True)
    if tl.load(first_row + 2, volatile=True) < 0:
        out_row = tl.load(entry, mask=stored, other=0).to(tl.int64) * out_stride + head * HEAD_DIM
        tl.store(
            out + out_row[:, None] + dims[None, :],
            result.to(out.dtype.element_ty),
            mask=stored[:, None] & in_head[None, :],
        )
    else:
        partial = tl.load(entry + 2, mask=stored, other=0) + tl.load(item + 5)
        slot = partial.to(tl.int64) * (KV_HEADS * GROUP) + head
        tl.store(
            partial_out + (slot * HEAD_DIM)[:, None] + dims[None, :], result, mask=stored[:, None] & in_head[None, :]
        )
        lse = tl.where(total > 0.0, top + tl.log2(divisor), float("-inf"))
        tl.store(partial_lse + slot, lse, mask=stored)


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
    config: AttentionConfig | None = None,
) -> Tensor:
    """Fill `out` [T, H, D]; see the wrapper for the contract. `config`: another than `choose_config`'s, to measure it.

    Without `meta.work` for this window the list is planned here, which waits for the device: single calls, tests.
    """
    work = meta.work.get(window)
    if work is None:
        work = build_work(q, k_pool, meta, window)
    kv_heads, page_size, head_dim = k_pool.shape[1:]
    if config is None:
        config = choose_config(
            head_dim=head_dim,
            itemsize=q.element_size(),
            has_wide=work.has_wide,
            shared_limit=device_limits.shared_limit(q.device),
        )
    if work.num_programs:
        score_scale, cap = _scales(scale, softcap)
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
            **attention_constants(
                heads=q.shape[1],
                kv_heads=kv_heads,
                head_dim=head_dim,
                page_size=page_size,
                has_wide=work.has_wide,
                has_window=window is not None,
                has_softcap=softcap is not None,
                config=config,
            ),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            maxnreg=config.max_registers,
        )
    if work.merges.shape[0]:
        merge_kernel[(work.merges.shape[0], q.shape[1])](
            work.partial_out,
            work.partial_lse,
            out,
            work.header,
            work.merges,
            out.stride(0),
            **merge_constants(q.shape[1], head_dim),
            num_warps=MERGE_WARPS,
            num_stages=MERGE_STAGES,
        )
    return out


def build_work(q: Tensor, k_pool: Tensor, meta: AttentionMetadata, window: int | None) -> AttentionWork:
    """The step's work list from its metadata: several device-to-host copies, so not for the steps of an engine.

    Raises ValueError: a prefix group's sequences do not have the same pages.
    """
    groups = None
    if meta.groups is not None:
        groups = _HostGroups(
            *(x.numpy(force=True) for x in (meta.groups.starts, meta.groups.sequences, meta.groups.num_pages))
        )
    heads, head_dim = q.shape[1:]
    kv_heads, page_size = k_pool.shape[1:3]
    plan = plan_attention(
        meta.query_starts.numpy(force=True),
        meta.context_lens.numpy(force=True),
        groups,
        num_tokens=q.shape[0],
        group_size=heads // kv_heads,
        page_size=page_size,
        table_width=meta.page_tables.shape[1],
        window=window,
    )
    if groups is not None:
        _check_tables(groups, meta.page_tables.numpy(force=True))
    return device_work(
        plan,
        lambda array: torch.from_numpy(array).to(q.device),
        torch.empty(plan.num_partials, heads, head_dim, dtype=torch.float32, device=q.device),
        torch.empty(plan.num_partials, heads, dtype=torch.float32, device=q.device),
        num_programs=plan.num_items * kv_heads,
    )


@dataclass(frozen=True, slots=True)
class _HostGroups:
    """PrefixGroups in numpy."""

    starts: NDArray[np.int32]
    sequences: NDArray[np.int32]
    num_pages: NDArray[np.int32]


def _check_tables(groups: _HostGroups, tables: NDArray[np.int32]) -> None:
    for first, last, pages in zip(groups.starts[:-1], groups.starts[1:], groups.num_pages, strict=True):
        shared = tables[groups.sequences[first:last], :pages]
        if len(shared) and (shared != shared[0]).any():
            raise ValueError("paged_attention: a prefix group's sequences must have the same first pages")


def _scales(scale: float, softcap: float | None) -> tuple[float, float]:
    """(score_scale, softcap) of the kernel: scores as exponents of 2."""
    if softcap is None:
        return scale * LOG2E, 0.0
    return 2.0 * scale / softcap * LOG2E, softcap * LOG2E


_POINTERS = ("q", "k_pool", "v_pool", "out")
_INDICES = dict.fromkeys(("tables", "header", "items", "rows"), "*i32")
_PARTIALS = {"partial_out": "*fp32", "partial_lse": "*fp32"}
_TYPES = {2: ("*bf16", ""), 4: ("*fp32", " fp32")}  # by bytes of an element: of pointers, and how a config is named


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What of a model attention sees."""

    model: str
    heads: int
    kv_heads: int
    head_dim: int
    page_sizes: tuple[int, ...] = (16,)
    itemsizes: tuple[int, ...] = (2,)
    window: bool = False
    softcap: bool = False


_SHAPES = (
    AttentionShape(model="qwen3-0.6b", heads=16, kv_heads=8, head_dim=128, page_sizes=(16, 64)),
    AttentionShape(model="llama-3.1-8b", heads=32, kv_heads=8, head_dim=128, itemsizes=(2, 4)),
    AttentionShape(model="qwen2.5-7b", heads=28, kv_heads=4, head_dim=128),
    AttentionShape(model="smollm2-135m", heads=9, kv_heads=3, head_dim=64, itemsizes=(2, 4)),
    AttentionShape(model="phi-3-mini", heads=32, kv_heads=32, head_dim=96, window=True),
    AttentionShape(model="gemma-3-1b", heads=4, kv_heads=1, head_dim=256, window=True),
    AttentionShape(model="gemma-2-2b", heads=8, kv_heads=4, head_dim=256, itemsizes=(2, 4), window=True, softcap=True),
)


def specs() -> list[KernelSpec]:
    """Attention of the models we know best, decodes alone and with tiles, for each size of shared memory; the merge."""
    attention = [
        attention_spec(shape, page_size, itemsize, has_wide, shared_limit)
        for shape in _SHAPES
        for page_size in shape.page_sizes
        for itemsize in shape.itemsizes
        for has_wide in (False, True)
        for shared_limit in sorted(set(device_limits.SHARED_LIMITS.values()))
    ]
    return attention + [
        _merge_spec(heads, head_dim) for heads, head_dim in ((16, 128), (32, 128), (9, 64), (32, 96), (4, 256))
    ]


def attention_spec(
    shape: AttentionShape, page_size: int, itemsize: int, has_wide: bool, shared_limit: int
) -> KernelSpec:
    """The launch for a model's decodes, or for steps with wide items, on devices with so much shared memory."""
    config = choose_config(head_dim=shape.head_dim, itemsize=itemsize, has_wide=has_wide, shared_limit=shared_limit)
    pointers, suffix = _TYPES[itemsize]
    strides = ("q_stride", "out_stride", "pool_stride")
    return KernelSpec(
        stem="paged_attention",
        config=f"{shape.model} page {page_size} {'mixed' if has_wide else 'decode'}"
        + (" window" if shape.window else "")
        + (" softcap" if shape.softcap else "")
        + suffix,
        kernel=attention_kernel,
        signature=dict.fromkeys(_POINTERS, pointers)
        | _INDICES
        | _PARTIALS
        | dict.fromkeys((*strides, "window"), "i32")
        | {"score_scale": "fp32", "softcap": "fp32"},
        constants=attention_constants(
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            page_size=page_size,
            has_wide=has_wide,
            has_window=shape.window,
            has_softcap=shape.softcap,
            config=config,
        ),
        divisible=frozenset((*_POINTERS, *_INDICES, *_PARTIALS, *strides)),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        max_registers=config.max_registers,
        wants_tensor_cores=True,
        archs=device_limits.archs_of(shared_limit),
    )


def _merge_spec(heads: int, head_dim: int) -> KernelSpec:
    pointers = _PARTIALS | {"out": "*bf16", "header": "*i32", "merges": "*i32"}
    return KernelSpec(
        stem="paged_attention",
        config=f"merge {heads} x {head_dim}",
        kernel=merge_kernel,
        signature=pointers | {"out_stride": "i32"},
        constants=merge_constants(heads, head_dim),
        divisible=frozenset((*pointers, "out_stride")),
        num_warps=MERGE_WARPS,
        num_stages=MERGE_STAGES,
    )
