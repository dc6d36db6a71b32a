"""Causal attention of new tokens over each sequence's pages, prefill chunks and decodes in one call."""

import torch
from torch import Tensor

from nightmill_kernels.metadata import AttentionMetadata
from nightmill_kernels.reference import paged_attention as reference

__all__ = ["AttentionMetadata", "paged_attention"]


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

    Call `store_kv` first: a token sees itself. `window` w: the token at position p sees p-w+1..p. `softcap` c: scores
    become c·tanh(score/c). Rows that see nothing and padding give 0. Slots outside a sequence's context, the null page
    among them, may hold anything, NaN included. `out` may be given (rows contiguous) and is returned.
    Raises ValueError for a layout it cannot take.
    """
    _check(q, k_pool, v_pool, meta, window)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    elif out.shape != q.shape or out.dtype != q.dtype:
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)}, q is {q.dtype} {tuple(q.shape)}: they must agree")
    return reference.paged_attention(q, k_pool, v_pool, meta, scale=scale, window=window, softcap=softcap, out=out)


def _check(q: Tensor, k_pool: Tensor, v_pool: Tensor, meta: AttentionMetadata, window: int | None) -> None:
    if k_pool.shape != v_pool.shape or k_pool.dim() != 4 or q.dim() != 3:
        raise ValueError(
            f"q {tuple(q.shape)} must be [T, H, D], pools {tuple(k_pool.shape)} and {tuple(v_pool.shape)} "
            "both [N, Hk, page_size, D]"
        )
    if q.shape[2] != k_pool.shape[3] or q.shape[1] % k_pool.shape[1]:
        raise ValueError(f"q {tuple(q.shape)} does not fit pools {tuple(k_pool.shape)}: same D, H a multiple of Hk")
    if not (q.dtype == k_pool.dtype == v_pool.dtype):
        raise ValueError(f"q is {q.dtype}, pools are {k_pool.dtype} and {v_pool.dtype}: one dtype is needed")
    sequences = meta.num_sequences
    if meta.query_starts.shape != (sequences + 1,) or meta.page_tables.shape[0] != sequences:
        raise ValueError(
            f"query_starts {tuple(meta.query_starts.shape)} and page_tables {tuple(meta.page_tables.shape)} "
            f"must be [{sequences + 1}] and [{sequences}, P]"
        )
    if window is not None and window < 1:
        raise ValueError(f"window is {window}: a token sees at least itself, pass None for no window")
