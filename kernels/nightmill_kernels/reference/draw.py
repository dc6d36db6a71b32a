"""Random draws in plain torch, by their definition: cut, add noise, take the best."""

import torch
from torch import Tensor

from nightmill_kernels.metadata import DrawRows
from nightmill_kernels.reference import elementary
from nightmill_kernels.reference.argmax import argmax
from nightmill_kernels.reference.philox import gumbel_at, gumbel_row

# Elements worked on at once: the intermediate words stay in the cache.
_CHUNK = 1 << 16
_CANDIDATES = 1024  # hold top_p of what most language models say; else all are sorted
_FEW = 16  # less than one in so many kept: their noise is drawn one by one


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
    kept = scaled >= _cut(scaled, rows)[:, None]
    if int(kept.sum()) * _FEW > kept.numel():
        noisy = gumbel_row(rows.seed, rows.position, scaled.shape[-1]).add_(scaled)
        return argmax(noisy.masked_fill_(~kept, -torch.inf))
    row, token = kept.nonzero().unbind(dim=-1)
    noisy = torch.full_like(scaled, -torch.inf)
    noisy[row, token] = scaled[row, token] + gumbel_at(rows.seed[row], rows.position[row], token)
    return argmax(noisy)


def _cut(scaled: Tensor, rows: DrawRows) -> Tensor:
    """[R]: the lowest logit that the filters keep."""
    highest = scaled.amax(dim=-1)
    cut = torch.where(rows.min_p > 0, highest + elementary.log(rows.min_p), -torch.inf)
    cut = torch.maximum(cut, _top_k_cut(scaled, rows.top_k))
    return torch.maximum(cut, _top_p_cut(scaled, highest, cut, rows.top_p))


def _top_k_cut(scaled: Tensor, top_k: Tensor) -> Tensor:
    limits = torch.where((top_k > 0) & (top_k < scaled.shape[-1]), top_k, 0).long()
    largest = int(limits.max())
    if largest == 0:
        return torch.full_like(scaled[:, 0], -torch.inf)
    kth = scaled.topk(largest, dim=-1).values.gather(-1, (limits.clamp(min=1) - 1)[:, None]).squeeze(-1)
    return torch.where(limits > 0, kth, -torch.inf)


def _top_p_cut(scaled: Tensor, highest: Tensor, cut: Tensor, top_p: Tensor) -> Tensor:
    """Of what `cut` keeps."""
    if not bool((top_p < 1).any()):
        return torch.full_like(highest, -torch.inf)
    total = elementary.weight(scaled - highest[:, None]).masked_fill_(scaled < cut[:, None], 0).sum(dim=-1)
    wanted = (total.double() * top_p.double()).ceil().long().clamp(min=1)
    candidates = min(_CANDIDATES, scaled.shape[-1])
    while True:
        ordered = scaled.topk(candidates, dim=-1).values
        mass = elementary.weight(ordered - highest[:, None]).masked_fill_(ordered < cut[:, None], 0)
        up_to = mass.cumsum(dim=-1)
        if candidates == scaled.shape[-1] or bool(((up_to[:, -1] >= wanted) | (top_p >= 1)).all()):
            break
        candidates = scaled.shape[-1]
    kept = ((up_to - mass) < wanted[:, None]).sum(dim=-1)
    return torch.where(top_p < 1, ordered.gather(-1, kept[:, None] - 1).squeeze(-1), -torch.inf)
