"""Logarithm, exponential and Philox noise in Triton, each operation rounded once: the bits of reference/elementary.py
and reference/philox.py, which say where the numbers come from.

A kernel that calls these is launched with `enable_fp_fusion=False`: a fused multiply-add would round once where the
reference rounds twice. Division is `div_rn`; Triton's own is an approximation.
"""

import triton
import triton.language as tl


@triton.jit
def log(x):
    """Natural logarithm of float32 > 0."""
    bits = x.to(tl.int32, bitcast=True) - 0x3F3504F3
    exponent = (bits >> 23).to(tl.float32)
    f = ((bits & 0x7FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True) - 1.0
    y = f * 7.0376836292e-2 - 1.1514610310e-1
    y = y * f + 1.1676998740e-1
    y = y * f - 1.2420140846e-1
    y = y * f + 1.4249322787e-1
    y = y * f - 1.6668057665e-1
    y = y * f + 2.0000714765e-1
    y = y * f - 2.4999993993e-1
    y = y * f + 3.3333331174e-1
    square = f * f
    y = y * f * square
    y = y + exponent * -2.12194440e-4
    y = y - square * 0.5
    return (f + y) + exponent * 0.693359375


@triton.jit
def weight(x):
    """int64 ⌊e^x · 2^42⌋ of float32 x ≤ 0."""
    y = x * 1.44269504088896341
    y = tl.where(y < -60.0, -60.0, y)
    whole = (y + 12582912.0) - 12582912.0
    f = y - whole
    p = f * 1.5403530e-4 + 1.3333558e-3
    p = p * f + 9.6181291e-3
    p = p * f + 5.5504109e-2
    p = p * f + 2.4022651e-1
    p = p * f + 6.9314718e-1
    p = p * f + 1.0
    mantissa = (p * 16777216.0).to(tl.int32).to(tl.int64)
    return (mantissa << 18) >> (0.0 - whole).to(tl.int32).to(tl.int64)


@triton.jit
def philox(block, seed, position):
    """The four words of each Philox-4x32-10 block: uint32, shaped as `block` (uint32); int64 scalars or same shape."""
    k0 = seed.to(tl.uint64, bitcast=True) & 0xFFFFFFFF
    k1 = seed.to(tl.uint64, bitcast=True) >> 32
    c0 = block
    c1 = (position & 0xFFFFFFFF).to(tl.uint32)
    c2 = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c3 = c2 ^ c2
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0.to(tl.uint32)
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1.to(tl.uint32)
        c1 = (p1 & 0xFFFFFFFF).to(tl.uint32)
        c3 = (p0 & 0xFFFFFFFF).to(tl.uint32)
        k0 = (k0 + 0x9E3779B9) & 0xFFFFFFFF
        k1 = (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


@triton.jit
def gumbel(word):
    """-log(-log(1 - w)) for w uniform in (0, 1), of uint32."""
    survival = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    survival = tl.where(survival > 0.99999994039535522461, 0.99999994039535522461, survival)
    rest = 1.0 - survival
    left_out = -survival - (rest - 1.0)
    return -log(-(log(rest) + tl.div_rn(left_out, rest)))


@triton.jit
def gumbel_at(token, seed, position):
    """The noise of single token ids."""
    w0, w1, w2, w3 = philox((token >> 2).to(tl.uint32), seed, position)
    lane = token & 3
    return gumbel(tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3)))
