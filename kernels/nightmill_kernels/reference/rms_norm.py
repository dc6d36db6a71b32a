"""RMS norm in plain torch, fp32 inside, rounded once."""

from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float) -> Tensor:
    """x · rsqrt(mean(x²) + eps) · (weight + weight_offset) over the last dimension."""
    wide = x.float()
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * scale * (weight.float() + weight_offset)).to(x.dtype)
