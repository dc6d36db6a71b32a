"""RMS norm, alone and fused with the residual add."""

import torch
from torch import Tensor

from nightmill_kernels.backend import library_for, on_triton
from nightmill_kernels.cpu.library import DTYPES, NormCall
from nightmill_kernels.layout import heads_dense
from nightmill_kernels.reference import rms_norm as reference


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0, out: Tensor | None = None) -> Tensor:
    """x · rsqrt(mean(x²) + eps) · (weight + weight_offset) over the last dimension, computed in fp32, rounded once.

    x [T, F], or [T, H, D] with contiguous heads (a view of a fused projection: q and k norms); weight [F] or [D].
    `out` may be x itself. Gemma keeps weight - 1: weight_offset=1.
    """
    _check(x, weight)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    else:
        _check_out(x, out)
    if on_triton(x):
        from nightmill_kernels.gpu import rms_norm as gpu

        gpu.rms_norm(x, None, weight, out, eps, weight_offset)
        return out
    library = library_for(x, weight)
    if library is not None and library.rms_norm(_call(x, None, weight, out, eps, weight_offset)):
        return out
    return out.copy_(reference.rms_norm(x, weight, eps, weight_offset))


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    weight_offset: float = 0.0,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual); the sum is rounded to the dtype before it is normalised.

    `residual` (contiguous) is updated in place and returned. `out` is where the first goes; it may be x itself.
    """
    _check(x, weight)
    if out is not None:
        _check_out(x, out)
    if x.shape != residual.shape or x.dtype != residual.dtype or not residual.is_contiguous():
        raise ValueError(f"residual {residual.dtype} {tuple(residual.shape)} must be contiguous and like x {x.shape}")
    if on_triton(x):
        from nightmill_kernels.gpu import rms_norm as gpu

        out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
        gpu.rms_norm(x, residual, weight, out, eps, weight_offset)
        return out, residual
    library = library_for(x, weight)
    if library is not None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
        if library.rms_norm(_call(x, residual, weight, out, eps, weight_offset)):
            return out, residual
    residual += x
    normalised = reference.rms_norm(residual, weight, eps, weight_offset)
    return normalised if out is None else out.copy_(normalised), residual


def _call(
    x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, eps: float, weight_offset: float
) -> NormCall:
    return NormCall(
        x=x.data_ptr(),
        residual=None if residual is None else residual.data_ptr(),
        weight=weight.data_ptr(),
        out=out.data_ptr(),
        outer=x.shape[0],
        inner=1 if x.dim() == 2 else x.shape[1],
        dim=x.shape[-1],
        x_stride=x.stride(0),
        out_stride=out.stride(0),
        dtype=DTYPES[x.dtype],
        threads=torch.get_num_threads(),
        eps=eps,
        weight_offset=weight_offset,
    )


def _check_out(x: Tensor, out: Tensor) -> None:
    if out.shape != x.shape or out.dtype != x.dtype or not heads_dense(out):
        raise ValueError(f"out {out.dtype} {tuple(out.shape)} must be like x, {x.dtype} {tuple(x.shape)}")


def _check(x: Tensor, weight: Tensor) -> None:
    if x.dim() not in (2, 3) or weight.shape != x.shape[-1:]:
        raise ValueError(f"x {tuple(x.shape)} must be [T, F] or [T, H, D], weight {tuple(weight.shape)} its last size")
    if not (heads_dense(x) and weight.is_contiguous()):
        raise ValueError(f"rows of x must be contiguous, not strides {x.stride()}, and weight too")
