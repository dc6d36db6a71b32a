"""Random draws in plain torch, by their definition: sort, cut, add noise, take the best."""

import torch
from torch import Tensor

from nightmill_kernels.metadata import DrawRows
from nightmill_kernels.reference import elementary
from nightmill_kernels.reference.argmax import argmax
from nightmill_kernels.reference.philox import gumbel_row

# Elements worked on at once: the intermediate words stay in the cache.
_CHUNK = 1 << 16


def draw(logits: Tensor, rows: DrawRows) -> Tensor:
    """See nightmill_kernels.draw: int32 [R] of logits [R, V]."""
    drawn = argmax(logits)
    random = ((rows.temperature > 0) & (drawn >= 0)).nonzero().squeeze(-1)
    step = max(1, _CHUNK // logits.shape[-1])
    for start in range(0, len(random), step):
        index = random[start : start + step]
        drawn[index] = _draw(logits[index].float(), rows.at(index))
    return drawn


def _draw(logits: Tensor, rows: DrawRows) -> Tensor:
    scaled = logits / rows.temperature[:, None]
    cut = _cut(scaled, rows)
    noisy = gumbel_row(rows.seed, rows.position, scaled.shape[-1]).add_(scaled)
    return argmax(noisy.masked_fill_(scaled < cut[:, None], -torch.inf))


def _cut(scaled: Tensor, rows: DrawRows) -> Tensor:
    """[R]: the lowest logit that the filters keep."""
    highest = scaled.amax(dim=-1)
    cut = torch.where(rows.min_p > 0, highest + elementary.log(rows.min_p), -torch.inf)
    is_limited = (rows.top_k > 0) & (rows.top_k < scaled.shape[-1])
    if not bool((is_limited | (rows.top_p < 1)).any()):
        return cut
    ordered = scaled.sort(dim=-1, descending=True).values
    kth = ordered.gather(-1, (rows.top_k.long().clamp(1, scaled.shape[-1]) - 1)[:, None]).squeeze(-1)
    cut = torch.where(is_limited, torch.maximum(cut, kth), cut)
    mass = elementary.weight(ordered - highest[:, None]).masked_fill_(ordered < cut[:, None], 0)
    up_to = mass.cumsum(dim=-1)
    wanted = (up_to[:, -1].double() * rows.top_p.double()).ceil().long().clamp(min=1)
    kept = ((up_to - mass) < wanted[:, None]).sum(dim=-1)
    share = ordered.gather(-1, kept[:, None] - 1).squeeze(-1)
    return torch.where(rows.top_p < 1, torch.maximum(cut, share), cut)
