"""Causal attention of new tokens over each sequence's pages, prefill chunks and decodes in one call."""

import torch
from torch import Tensor

from nightmill_kernels.backend import library_for, on_triton
from nightmill_kernels.cpu.library import DTYPES, AttentionCall
from nightmill_kernels.layout import heads_dense, pages_dense, pages_paired
from nightmill_kernels.metadata import AttentionMetadata, PrefixGroups
from nightmill_kernels.reference import paged_attention as reference

__all__ = ["AttentionMetadata", "PrefixGroups", "paged_attention"]


def paged_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    meta: AttentionMetadata,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention output [T, H, D] of q [T, H, D] over pools [N, Hk, page_size, D]; H is a multiple of Hk.

    Call `store_kv` first: a token sees itself, and pages hold what that made of them (`layout.pages_paired`). `window`
    w: the token at position p sees p-w+1..p. `softcap` c: scores become c·tanh(score/c). Rows that see nothing and
    padding give 0. Slots outside a sequence's context, the null page among them, may hold anything, NaN included. `out`
    may be given (rows contiguous) and is returned. `meta.groups` changes the speed, in the C library not a bit of the
    result; a windowed call ignores them.
    Raises ValueError for a layout it cannot take.
    """
    _check(q, k_pool, v_pool, meta, scale, window, softcap)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    elif out.shape != q.shape or out.dtype != q.dtype or not heads_dense(out):
        raise ValueError(
            f"out {out.dtype} {tuple(out.shape)} must be like q, {q.dtype} {tuple(q.shape)}, heads contiguous"
        )
    if on_triton(q):
        from nightmill_kernels.gpu import paged_attention as gpu

        return gpu.paged_attention(q, k_pool, v_pool, meta, scale=scale, window=window, softcap=softcap, out=out)
    library = library_for(q, k_pool, v_pool)
    if library is not None and library.paged_attention(_call(q, k_pool, v_pool, meta, scale, window, softcap, out)):
        return out
    paired = pages_paired(k_pool)
    return reference.paged_attention(
        q, k_pool, v_pool, meta, scale=scale, window=window, softcap=softcap, out=out, paired=paired
    )


def _call(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    meta: AttentionMetadata,
    scale: float,
    window: int | None,
    softcap: float | None,
    out: Tensor,
) -> AttentionCall:
    num_pages, kv_heads, page_size, head_dim = k_pool.shape
    groups = meta.groups
    return AttentionCall(
        q=q.data_ptr(),
        k_pool=k_pool.data_ptr(),
        v_pool=v_pool.data_ptr(),
        out=out.data_ptr(),
        query_starts=meta.query_starts.data_ptr(),
        context_lens=meta.context_lens.data_ptr(),
        page_tables=meta.page_tables.data_ptr(),
        group_starts=None if groups is None else groups.starts.data_ptr(),
        group_members=None if groups is None else groups.sequences.data_ptr(),
        group_pages=None if groups is None else groups.num_pages.data_ptr(),
        q_stride=q.stride(0),
        out_stride=out.stride(0),
        pool_stride=k_pool.stride(0),
        num_tokens=q.shape[0],
        num_pages=num_pages,
        num_sequences=meta.num_sequences,
        table_width=meta.page_tables.shape[1],
        heads=q.shape[1],
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=DTYPES[q.dtype],
        window=window or 0,
        threads=torch.get_num_threads(),
        num_groups=0 if groups is None else groups.num_pages.shape[0],
        num_members=0 if groups is None else groups.sequences.shape[0],
        scale=scale,
        softcap=softcap or 0.0,
    )


def _check(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    meta: AttentionMetadata,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> None:
    if k_pool.shape != v_pool.shape or k_pool.dim() != 4 or q.dim() != 3:
        raise ValueError(
            f"q {tuple(q.shape)} must be [T, H, D], pools {tuple(k_pool.shape)} and {tuple(v_pool.shape)} "
            "both [N, Hk, page_size, D]"
        )
    if q.shape[2] != k_pool.shape[3] or q.shape[1] % k_pool.shape[1]:
        raise ValueError(f"q {tuple(q.shape)} does not fit pools {tuple(k_pool.shape)}: same D, H a multiple of Hk")
    if not (q.dtype == k_pool.dtype == v_pool.dtype):
        raise ValueError(f"q is {q.dtype}, pools are {k_pool.dtype} and {v_pool.dtype}: one dtype is needed")
    if not (heads_dense(q) and pages_dense(k_pool) and k_pool.stride() == v_pool.stride()):
        raise ValueError(
            f"strides of q {q.stride()} and pools {k_pool.stride()}, {v_pool.stride()}: the heads of a token and each "
            "page must be contiguous, both pools alike"
        )
    if window is not None and window < 1:
        raise ValueError(f"window is {window}: a token sees at least itself, pass None for no window")
    if not scale > 0.0 or (softcap is not None and not softcap > 0.0):
        raise ValueError(f"scale is {scale}, softcap is {softcap}: both must be positive, softcap may be None")
    sequences = meta.num_sequences
    if meta.query_starts.shape != (sequences + 1,) or meta.page_tables.shape[0] != sequences:
        raise ValueError(
            f"query_starts {tuple(meta.query_starts.shape)} and page_tables {tuple(meta.page_tables.shape)} "
            f"must be [{sequences + 1}] and [{sequences}, P]"
        )
    groups = meta.groups
    if groups is not None and groups.starts.shape[0] != groups.num_pages.shape[0] + 1:
        raise ValueError(f"{groups.num_pages.shape[0]} prefix groups need one start more, not {groups.starts.shape[0]}")
    of_groups = () if groups is None else (groups.starts, groups.sequences, groups.num_pages)
    for tensor in (meta.query_starts, meta.context_lens, meta.page_tables, *of_groups):
        if tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise ValueError(f"attention metadata must be contiguous int32, not {tensor.dtype} {tensor.stride()}")
