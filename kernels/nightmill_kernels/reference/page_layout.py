"""Paired pages in plain torch: what a page holds where the C library multiplies bf16 in pairs (see cpu/nightmill.h).

K  plain [page_size, D]   paired [page_size / 16, D / 2, 16, 2]: pairs of neighbouring elements, 16 keys side by side
V  plain [page_size, D]   paired [page_size / 16, 8, D, 2]: pairs of neighbouring keys
"""

from torch import Tensor

GROUP = 16
"""Keys that lie together."""


def keys_by_group(pages: Tensor) -> Tensor:
    """Paired K pages […, page_size, D] as a view […, page_size / 16, D / 2, 16, 2]."""
    *outer, page_size, head_dim = pages.shape
    return pages.view(*outer, page_size // GROUP, head_dim // 2, GROUP, 2)


def values_by_group(pages: Tensor) -> Tensor:
    """Paired V pages […, page_size, D] as a view […, page_size / 16, 8, D, 2]."""
    *outer, page_size, head_dim = pages.shape
    return pages.view(*outer, page_size // GROUP, GROUP // 2, head_dim, 2)


def plain_keys(pages: Tensor) -> Tensor:
    """Paired K pages as plain ones, a copy."""
    return keys_by_group(pages).transpose(-3, -2).reshape(pages.shape)


def plain_values(pages: Tensor) -> Tensor:
    """Paired V pages as plain ones, a copy."""
    return values_by_group(pages).transpose(-2, -1).reshape(pages.shape)
