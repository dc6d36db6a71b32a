"""Gather and scatter of pages in plain torch."""

import torch
from torch import Tensor


def gather_pages(pool: Tensor, pages: Tensor, out: Tensor) -> None:
    """out[i, plane] = pool[plane, pages[i]]."""
    out.copy_(torch.index_select(pool, 1, pages).transpose(0, 1))


def scatter_pages(staging: Tensor, pages: Tensor, pool: Tensor) -> None:
    """pool[plane, pages[i]] = staging[i, plane]."""
    pool.index_copy_(1, pages, staging.transpose(0, 1))
