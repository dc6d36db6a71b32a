"""Rotary position embedding."""

from torch import Tensor

from nightmill_kernels.reference import rope as reference


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """Rotate q [T, H, D] and k [T, Hk, D] in place, rotate-half convention.

    cos_sin fp32 [max_len, rot]: the first rot/2 columns are cosines, the others sines. rot < D leaves the tail as it
    is. positions int32 or int64 [T], each below max_len. q and k may be views of a fused projection.
    """
    rot = cos_sin.shape[1]
    if rot % 2 or rot > q.shape[-1] or q.shape[-1] != k.shape[-1]:
        raise ValueError(f"cos_sin has {rot} columns: an even number, at most the head size {q.shape[-1]}, is needed")
    if positions.shape != q.shape[:1] or q.shape[0] != k.shape[0]:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, positions {tuple(positions.shape)}: T differs")
    reference.rope(q, k, positions, cos_sin)
