"""Philox-4x32-10, the counter-based generator behind every random draw.

J. Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011. Counter-based: a draw is a pure function of
(seed, position, token id), so batch mates, preemption, device and restarts cannot change it.
Words are unsigned 32-bit values held in int64 tensors: torch has no full unsigned 32 × 32 multiplication.
"""

import torch
from torch import Tensor

from nightmill_kernels.reference import elementary

Words = tuple[Tensor, Tensor, Tensor, Tensor]

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_ROUNDS = 10
# Largest survival probability that float32 tells from 1; it bounds the smallest Gumbel at about −2.8.
_MAX_SURVIVAL = 1.0 - 2.0**-24
MAX_GUMBEL = 22.88
"""No Gumbel value drawn here is larger: 32 bits give at most −log(2⁻³³)."""
MIN_GUMBEL = -2.82
"""None is smaller."""


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Four random words for each counter. Shapes broadcast; all values in [0, 2³²)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0 = c0 * _MULTIPLIERS[0]
        p1 = c2 * _MULTIPLIERS[1]
        # The product is an unsigned 64-bit value in a signed type: the arithmetic shift needs the mask.
        c0 = ((p1 >> 32) & _MASK) ^ c1 ^ k0
        c2 = ((p0 >> 32) & _MASK) ^ c3 ^ k1
        c1 = p1 & _MASK
        c3 = p0 & _MASK
        k0 = (k0 + _WEYL[0]) & _MASK
        k1 = (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def gumbel_row(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Float32 [n, vocab_size]: the Gumbel noise of every token id, for n sequences.

    Args:
        seeds: int64 [n], the bits of an unsigned 64-bit seed.
        positions: int64 [n], index in the sequence of the token being drawn.
        vocab_size: ids are [0, vocab_size).
    """
    blocks = torch.arange((vocab_size + 3) // 4, dtype=torch.int64, device=seeds.device)[None, :]
    words = philox(_counter(blocks, positions[:, None]), _key(seeds[:, None]))
    return _gumbel(torch.stack(words, dim=-1).flatten(1)[:, :vocab_size])


def gumbel_at(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Float32, shaped as token_ids: the noise of single ids, equal to gumbel_row's. int64 arguments, broadcast."""
    words = torch.stack(philox(_counter(token_ids >> 2, positions), _key(seeds)), dim=-1)
    return _gumbel(words.gather(-1, (token_ids & 3)[..., None]).squeeze(-1))


def _counter(blocks: Tensor, positions: Tensor) -> Words:
    """Each counter serves four neighbouring token ids, one word each."""
    return blocks, positions & _MASK, (positions >> 32) & _MASK, torch.zeros_like(positions)


def _key(seeds: Tensor) -> tuple[Tensor, Tensor]:
    return seeds & _MASK, (seeds >> 32) & _MASK


def _gumbel(words: Tensor) -> Tensor:
    """−log(−log(1 − w)) for w uniform in (0, 1): precise in the upper tail, which decides the draw."""
    survival = ((words.to(torch.float32) + 0.5) * 2.0**-32).clamp_(max=_MAX_SURVIVAL)
    # 1 − w is rounded; what that leaves out is added to its logarithm.
    rest = 1.0 - survival
    left_out = survival.neg_() - (rest - 1.0)
    return elementary.log((elementary.log(rest) + left_out.div_(rest)).neg_()).neg_()
