"""Rotary position embedding in plain torch, rotate-half convention."""

import torch
from torch import Tensor


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """Rotate the first `rot` elements of every head of q and k in place."""
    cos, sin = cos_sin[positions.long()].float().unsqueeze(1).chunk(2, dim=-1)
    for x in (q, k):
        half = cos.shape[-1]
        first, second = x[..., :half].float(), x[..., half : 2 * half].float()
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        x[..., : 2 * half] = rotated.to(x.dtype)
