"""Greedy choice of a token."""

import torch
from torch import Tensor

from nightmill_kernels.backend import library_for, on_triton
from nightmill_kernels.reference import argmax as reference


def argmax(logits: Tensor) -> Tensor:
    """Id of the largest logit of each row [R, V] as int32 [R]; the lowest id wins a tie.

    -1 where the row has no finite largest logit (a NaN anywhere, +inf, or all -inf): that row's forward went wrong.
    """
    if logits.dim() != 2 or logits.shape[1] == 0 or logits.stride(1) != 1:
        raise ValueError(f"logits {tuple(logits.shape)} must be [R, V], V > 0, rows contiguous, not {logits.stride()}")
    if on_triton(logits):
        from nightmill_kernels.gpu import argmax as gpu

        out = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
        gpu.argmax(logits, out)
        return out
    library = library_for(logits)
    if library is None:
        return reference.argmax(logits)
    out = torch.empty(logits.shape[0], dtype=torch.int32)
    library.argmax(logits, out)
    return out
