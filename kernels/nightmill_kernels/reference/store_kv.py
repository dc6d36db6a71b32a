"""Scatter of new K and V into the page pool in plain torch."""

from torch import Tensor


def store_kv(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor) -> None:
    """Write token t's K and V [Hk, D] at slot `slots[t]`; negative slots are skipped."""
    page_size = k_pool.shape[2]
    real = slots >= 0
    if not bool(real.all()):
        k, v, slots = k[real], v[real], slots[real]
    page, offset = slots // page_size, slots % page_size
    k_pool[page, :, offset] = k
    v_pool[page, :, offset] = v
