"""Logarithm and exponential by plain float32 operations, each rounded once: the C library computes the same bits.

torch's own differ between machines, and between the lanes and the tail of a vector. What decides a draw must not.
"""

import torch
from torch import Tensor

# Of Cephes' logf (S. Moshier): log(1 + f) = f - f²/2 + f³ · P(f) for 1 + f between √½ and √2; error below 1 ulp.
_LOG = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4  # the first has so few digits that its multiples are exact
_SQRT_HALF = 0x3F3504F3  # the bits of √½
# 2^f for |f| ≤ ½, highest power first; that of nightmill_kernels' vec.h.
_EXP2 = (1.5403530e-4, 1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1, 1.0)
_LOG2E = 1.44269504088896341
_ROUNDER = 12582912.0  # 1.5 · 2^23: adding it rounds to an integer
WEIGHT_BITS = 42
"""A token as likely as the likeliest weighs 2^42: a million of them still fit 63 bits."""
_LOWEST_EXPONENT = -60.0  # weighs nothing


def log(x: Tensor) -> Tensor:
    """Natural logarithm of float32 > 0. What it makes of denormal numbers is rough, but the same everywhere."""
    bits = x.view(torch.int32) - _SQRT_HALF
    exponent = (bits >> 23).to(torch.float32)
    f = ((bits & 0x7FFFFF) + _SQRT_HALF).view(torch.float32) - 1.0
    y = f * _LOG[0] + _LOG[1]
    for coefficient in _LOG[2:]:
        y.mul_(f).add_(coefficient)
    square = f * f
    y.mul_(f).mul_(square)
    y += exponent * _LN2_LOW
    y -= square * 0.5
    return (f + y).add_(exponent.mul_(_LN2_HIGH))


def weight(x: Tensor) -> Tensor:
    """int64 ⌊e^x · 2^42⌋, as precise as float32 is, of float32 x ≤ 0.

    Integers, because their sum does not depend on the order: whether a token is among the first that hold top_p of the
    probability is then the same for every way to add up.
    """
    y = (x * _LOG2E).clamp_(min=_LOWEST_EXPONENT)
    whole = (y + _ROUNDER) - _ROUNDER
    f = y - whole
    p = f * _EXP2[0] + _EXP2[1]
    for coefficient in _EXP2[2:]:
        p.mul_(f).add_(coefficient)
    mantissa = p.mul_(float(1 << 24)).to(torch.int64)  # exact: p has 24 bits
    return (mantissa << (WEIGHT_BITS - 24)) >> whole.neg_().to(torch.int64)
