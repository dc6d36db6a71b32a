"""Writing new K and V into the page pool."""

import torch
from torch import Tensor

from nightmill_kernels.backend import library_for, on_triton
from nightmill_kernels.cpu.library import DTYPES, RopeCall
from nightmill_kernels.layout import heads_dense, pages_dense, pages_paired
from nightmill_kernels.reference import store_kv as reference


def store_kv(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor) -> None:
    """Write k, v [T, Hk, D] into pools [N, Hk, page_size, D] at slots int64 [T] = page · page_size + offset.

    A negative slot is padding and is skipped. k and v may be views of a fused projection (heads contiguous). Where in
    its page a token lies is `paged_attention`'s business too, see `layout.pages_paired`.
    """
    check_store(k, v, k_pool, v_pool, slots)
    if on_triton(k):
        from nightmill_kernels.gpu import store_kv as gpu

        gpu.store_kv(k, v, k_pool, v_pool, slots)
        return
    library = library_for(k, v, k_pool, v_pool)
    if library is None or not library.rope_store(RopeCall(**store_fields(k, v, k_pool, v_pool, slots))):
        reference.store_kv(k, v, k_pool, v_pool, slots, paired=pages_paired(k_pool))


def store_fields(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor) -> dict[str, int]:
    """The C call's fields that tell it what to store where."""
    return {
        "k": k.data_ptr(),
        "v": v.data_ptr(),
        "k_pool": k_pool.data_ptr(),
        "v_pool": v_pool.data_ptr(),
        "slots": slots.data_ptr(),
        "k_stride": k.stride(0),
        "v_stride": v.stride(0),
        "pool_stride": k_pool.stride(0),
        "num_tokens": k.shape[0],
        "num_pages": k_pool.shape[0],
        "kv_heads": k.shape[1],
        "head_dim": k.shape[2],
        "page_size": k_pool.shape[2],
        "dtype": DTYPES[k.dtype],
        "threads": torch.get_num_threads(),
    }


def check_store(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor) -> None:
    """Raise ValueError for shapes and strides that cannot be stored."""
    _, kv_heads, _, head_dim = k_pool.shape
    if k.shape != v.shape or slots.shape != k.shape[:1] or k.shape[1:] != (kv_heads, head_dim):
        raise ValueError(
            f"k {tuple(k.shape)} and v {tuple(v.shape)} must be [T, {kv_heads}, {head_dim}] as the pools "
            f"{tuple(k_pool.shape)} are, slots {tuple(slots.shape)} [T]"
        )
    if k_pool.shape != v_pool.shape or k_pool.stride() != v_pool.stride():
        raise ValueError(f"pools {tuple(k_pool.shape)} and {tuple(v_pool.shape)} must have one shape and layout")
    if not pages_dense(k_pool):
        raise ValueError(f"each page of the pool must be contiguous, not strides {k_pool.stride()}")
    if slots.dtype != torch.int64 or not slots.is_contiguous():
        raise ValueError(f"slots must be contiguous int64, not {slots.dtype} {slots.stride()}")
    for x in (k, v):
        if not heads_dense(x):
            raise ValueError(f"k and v must have contiguous heads, not strides {x.stride()}")
