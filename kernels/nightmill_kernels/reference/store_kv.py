"""Scatter of new K and V into the page pool in plain torch."""

from torch import Tensor

from nightmill_kernels.reference.page_layout import GROUP, keys_by_group, values_by_group


def store_kv(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor, *, paired: bool = False) -> None:
    """Write token t's K and V [Hk, D] at slot `slots[t]`; negative slots are skipped. `paired`: see page_layout."""
    page_size = k_pool.shape[2]
    real = slots >= 0
    if not bool(real.all()):
        k, v, slots = k[real], v[real], slots[real]
    page, offset = slots // page_size, slots % page_size
    if paired:
        group, key = offset // GROUP, offset % GROUP
        keys_by_group(k_pool)[page, :, group, :, key] = k.reshape(*k.shape[:2], -1, 2)
        values_by_group(v_pool)[page, :, group, key // 2, :, key % 2] = v
    else:
        k_pool[page, :, offset] = k
        v_pool[page, :, offset] = v
