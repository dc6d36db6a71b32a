"""Moving whole pages between a page pool and contiguous staging, for swap."""

import torch
from torch import Tensor

from nightmill_kernels.backend import on_triton
from nightmill_kernels.reference import gather_pages as reference


def gather_pages(pool: Tensor, pages: Tensor, out: Tensor) -> Tensor:
    """Copy pages out of a pool, bit for bit.

    Args:
        pool: [planes, N, …page]; a plane is K or V of one layer.
        pages: int64 [n], any order.
        out: contiguous [n, planes, …page]: all planes of a page lie together, so that one copy moves it.

    Returns:
        `out`.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    _check(pool, pages, out)
    if on_triton(pool) and _pages_whole(pool):
        from nightmill_kernels.gpu import gather_pages as gpu

        gpu.gather_pages(pool, pages, out)
    else:
        reference.gather_pages(pool, pages, out)
    return out


def scatter_pages(staging: Tensor, pages: Tensor, pool: Tensor) -> None:
    """Copy pages [n, planes, …page] back into a pool at `pages`, which are distinct; the inverse of `gather_pages`."""
    _check(pool, pages, staging)
    if on_triton(pool) and _pages_whole(pool):
        from nightmill_kernels.gpu import gather_pages as gpu

        gpu.scatter_pages(staging, pages, pool)
    else:
        reference.scatter_pages(staging, pages, pool)


def _pages_whole(pool: Tensor) -> bool:
    """True when each page is in one piece, whatever lies between pages and planes."""
    return pool.dim() > 2 and pool.numel() > 0 and pool[0, 0].is_contiguous()


def _check(pool: Tensor, pages: Tensor, staging: Tensor) -> None:
    if pool.dim() < 2 or staging.shape != (len(pages), pool.shape[0], *pool.shape[2:]):
        raise ValueError(
            f"staging {tuple(staging.shape)} must be [n, planes, …page] for {len(pages)} pages of the pool "
            f"{tuple(pool.shape)} = [planes, N, …page]"
        )
    if not staging.is_contiguous():
        raise ValueError(f"staging must be contiguous, not strides {staging.stride()}")
    if pages.dim() != 1 or pages.dtype != torch.int64:
        raise ValueError(f"pages must be int64 [n], not {pages.dtype} {tuple(pages.shape)}")
    if staging.dtype != pool.dtype or not pages.device == staging.device == pool.device:
        raise ValueError(
            f"pool ({pool.dtype}, {pool.device}), staging ({staging.dtype}, {staging.device}) and pages "
            f"({pages.device}) must agree in dtype and device"
        )
