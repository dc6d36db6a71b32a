"""RMS norm, alone and fused with the residual add."""

from torch import Tensor

from nightmill_kernels.reference import rms_norm as reference


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0, out: Tensor | None = None) -> Tensor:
    """x · rsqrt(mean(x²) + eps) · (weight + weight_offset) over the last dimension, computed in fp32, rounded once.

    x [..., F], weight [F]. `out` may be x itself. Gemma keeps weight - 1: weight_offset=1.
    """
    _check(x, weight)
    result = reference.rms_norm(x, weight, eps, weight_offset)
    return result if out is None else out.copy_(result)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual); the sum is rounded to the dtype before it is normalised.

    `residual` is updated in place and returned.
    """
    _check(x, weight)
    if x.shape != residual.shape:
        raise ValueError(f"x {tuple(x.shape)} and residual {tuple(residual.shape)} must agree")
    residual += x
    return reference.rms_norm(residual, weight, eps, weight_offset), residual


def _check(x: Tensor, weight: Tensor) -> None:
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight {tuple(weight.shape)} must be [{x.shape[-1]}], the last dimension of x")
