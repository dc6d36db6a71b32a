"""Greedy choice of a token."""

from torch import Tensor

from nightmill_kernels.reference import argmax as reference


def argmax(logits: Tensor) -> Tensor:
    """Id of the largest logit of each row [R, V] as int32 [R]; the lowest id wins a tie.

    -1 where the row has no finite largest logit (a NaN anywhere, +inf, or all -inf): that row's forward went wrong.
    """
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise ValueError(f"logits {tuple(logits.shape)} must be [R, V] with V > 0")
    return reference.argmax(logits)
