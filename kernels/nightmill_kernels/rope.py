"""Rotary position embedding, alone and fused with the write of K and V into the page pool."""

import torch
from torch import Tensor

from nightmill_kernels.backend import library_for, on_triton
from nightmill_kernels.cpu.library import DTYPES, RopeCall
from nightmill_kernels.layout import heads_dense, pages_paired
from nightmill_kernels.reference import rope as reference
from nightmill_kernels.reference import store_kv as store_reference
from nightmill_kernels.store_kv import check_store, store_fields


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """Rotate q [T, H, D] and k [T, Hk, D] in place, rotate-half convention.

    cos_sin fp32 [max_len, rot]: the first rot/2 columns are cosines, the others sines. rot < D leaves the tail as it
    is. positions int32 or int64 [T], each below max_len. q and k may be views of a fused projection.
    """
    check_rope(q, k, positions, cos_sin)
    if on_triton(q):
        from nightmill_kernels.gpu import rope as gpu

        gpu.rope(q, k, positions, cos_sin)
        return
    library = library_for(q, k)
    if library is None or not library.rope_store(RopeCall(**_rope_fields(q, k, positions, cos_sin))):
        reference.rope(q, k, positions, cos_sin)


def rope_store_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slots: Tensor,
) -> None:
    """`rope`, then `store_kv` of the rotated k and of v, in one pass over the tokens."""
    check_rope(q, k, positions, cos_sin)
    check_store(k, v, k_pool, v_pool, slots)
    if on_triton(q):
        from nightmill_kernels.gpu import rope as gpu

        gpu.rope_store_kv(q, k, v, positions, cos_sin, k_pool, v_pool, slots)
        return
    library = library_for(q, k, v, k_pool, v_pool)
    if library is not None:
        fields = _rope_fields(q, k, positions, cos_sin) | store_fields(k, v, k_pool, v_pool, slots)
        if library.rope_store(RopeCall(**fields)):
            return
    reference.rope(q, k, positions, cos_sin)
    store_reference.store_kv(k, v, k_pool, v_pool, slots, paired=pages_paired(k_pool))


def _rope_fields(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> dict[str, int]:
    return {
        "q": q.data_ptr(),
        "k": k.data_ptr(),
        "positions": positions.data_ptr(),
        "cos_sin": cos_sin.data_ptr(),
        "q_stride": q.stride(0),
        "k_stride": k.stride(0),
        "num_tokens": q.shape[0],
        "max_len": cos_sin.shape[0],
        "heads": q.shape[1],
        "kv_heads": k.shape[1],
        "head_dim": q.shape[2],
        "rot": cos_sin.shape[1],
        "dtype": DTYPES[q.dtype],
        "wide_positions": positions.dtype == torch.int64,
        "threads": torch.get_num_threads(),
    }


def check_rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """Raise ValueError for shapes and strides that cannot be rotated."""
    rot = cos_sin.shape[1]
    if rot % 2 or rot > q.shape[-1] or q.shape[-1] != k.shape[-1]:
        raise ValueError(f"cos_sin has {rot} columns: an even number, at most the head size {q.shape[-1]}, is needed")
    if positions.shape != q.shape[:1] or q.shape[0] != k.shape[0]:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, positions {tuple(positions.shape)}: T differs")
    if cos_sin.dtype != torch.float32 or not cos_sin.is_contiguous():
        raise ValueError(f"cos_sin must be contiguous fp32, not {cos_sin.dtype} {cos_sin.stride()}")
    if positions.dtype not in (torch.int32, torch.int64) or not positions.is_contiguous():
        raise ValueError(f"positions must be contiguous int32 or int64, not {positions.dtype} {positions.stride()}")
    for x in (q, k):
        if not heads_dense(x):
            raise ValueError(f"q and k must have contiguous heads, not strides {x.stride()}")
