"""Layouts the kernels take: dense heads of a token, dense pages. The strides between tokens and pages are free."""

from torch import Tensor

from nightmill_kernels.backend import library_for


def heads_dense(x: Tensor) -> bool:
    """True for [T, F] with dense rows and for [T, H, D] with the heads of a token one after the other."""
    return x.stride(-1) == 1 and (x.dim() == 2 or x.shape[1] == 1 or x.stride(1) == x.shape[2])


def pages_dense(pool: Tensor) -> bool:
    """True for [N, Hk, page_size, D] in which each page is in one piece."""
    _, kv_heads, page_size, head_dim = pool.shape
    within = pool.stride()[2:] == (head_dim, 1)
    return within and (kv_heads == 1 or pool.stride(1) == page_size * head_dim)


def pages_paired(pool: Tensor) -> bool:
    """True when what a page of this pool [N, Hk, page_size, D] holds is paired, see `reference.page_layout`.

    A function of the instruction set that calls run on now, the dtype, the page size and D: where the C library
    multiplies bf16 in pairs, every operation writes and reads such a pool so, elsewhere as its shape says. Whole pages
    may be copied without knowing.
    """
    library = library_for(pool)
    return library is not None and library.paired(pool.dtype, head_dim=pool.shape[3], page_size=pool.shape[2])
