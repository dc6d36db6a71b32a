"""Greedy choice in plain torch."""

import torch
from torch import Tensor


def argmax(logits: Tensor) -> Tensor:
    """Lowest id among the largest logits of each row; -1 where the largest is not a finite number."""
    top = logits.amax(-1, keepdim=True)  # NaN wins
    first = (logits == top).to(torch.int32).argmax(-1).to(torch.int32)
    return first.masked_fill(~top[:, 0].isfinite(), -1)
