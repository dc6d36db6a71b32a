"""Writing new K and V into the page pool."""

from torch import Tensor

from nightmill_kernels.reference import store_kv as reference


def store_kv(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor) -> None:
    """Write k, v [T, Hk, D] into pools [N, Hk, page_size, D] at slots int64 [T] = page · page_size + offset.

    A negative slot is padding and is skipped. k and v may be views of a fused projection (heads contiguous).
    """
    if k.shape != v.shape or slots.shape != k.shape[:1] or k_pool.shape != v_pool.shape:
        raise ValueError(
            f"k {tuple(k.shape)} and v {tuple(v.shape)} must be [T, Hk, D], slots {tuple(slots.shape)} [T], "
            f"pools {tuple(k_pool.shape)} and {tuple(v_pool.shape)} equal"
        )
    reference.store_kv(k, v, k_pool, v_pool, slots)
