"""Layouts the kernels take: dense heads of a token, dense pages. The strides between tokens and pages are free."""

from torch import Tensor


def heads_dense(x: Tensor) -> bool:
    """True for [T, F] with dense rows and for [T, H, D] with the heads of a token one after the other."""
    return x.stride(-1) == 1 and (x.dim() == 2 or x.shape[1] == 1 or x.stride(1) == x.shape[2])


def pages_dense(pool: Tensor) -> bool:
    """True for [N, Hk, page_size, D] in which each page is in one piece."""
    _, kv_heads, page_size, head_dim = pool.shape
    within = pool.stride()[2:] == (head_dim, 1)
    return within and (kv_heads == 1 or pool.stride(1) == page_size * head_dim)
