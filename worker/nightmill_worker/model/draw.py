"""Random draws: argmax of logit / temperature + Gumbel noise over the tokens that min-p, top-k and top-p leave.

Most rows are settled by their best few logits, found by a partial sort; the rest look at the whole vocabulary.
"""

from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nightmill_worker.engine.step import SampleBatch
from nightmill_worker.model.philox import MAX_GUMBEL, MIN_GUMBEL, gumbel_at, gumbel_row

# The best few. A constant: were it chosen by the batch, a row's rounding could depend on its batch mates.
_CANDIDATES = 128
_GROWTH = 8
# Elements of noise computed at once: the intermediate words stay in the cache.
_NOISE_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class RandomRows:
    """The parameters of n rows that draw at random: 1-D tensors."""

    temperature: Tensor  # float32
    min_p: Tensor  # float32
    top_k: Tensor  # int64, 0 = all
    top_p: Tensor  # float32
    seed: Tensor  # int64: the bits of the unsigned seed
    position: Tensor  # int64

    @classmethod
    def of(cls, batch: SampleBatch, rows: NDArray[np.int64], device: torch.device) -> "RandomRows":
        """Select `rows` of the batch."""
        return cls(
            temperature=torch.from_numpy(batch.temperature[rows]).to(device),
            min_p=torch.from_numpy(batch.min_p[rows]).to(device),
            top_k=torch.from_numpy(batch.top_k[rows].astype(np.int64)).to(device),
            top_p=torch.from_numpy(batch.top_p[rows]).to(device),
            seed=torch.from_numpy(batch.seed[rows].view(np.int64)).to(device),
            position=torch.from_numpy(batch.position[rows].astype(np.int64)).to(device),
        )

    def at(self, index: Tensor) -> "RandomRows":
        """A subset of the rows."""
        return RandomRows(*(getattr(self, field.name)[index] for field in fields(self)))


def draw(logits: Tensor, rows: RandomRows) -> Tensor:
    """int64 [n]: a token for each row of float32 [n, V] logits with a finite maximum."""
    vocab_size = logits.shape[-1]
    values, ids = logits.topk(min(_CANDIDATES, vocab_size), dim=-1)
    values /= rows.temperature[:, None]
    cut, is_known = _candidate_cut(logits, values, ids, rows)
    cut = torch.maximum(cut, _out_of_reach(values[:, 0]))
    noisy = values + gumbel_at(rows.seed[:, None], rows.position[:, None], ids)
    noisy.masked_fill_(values < cut[:, None], -torch.inf)
    best = noisy.amax(dim=-1, keepdim=True)
    drawn = ids.masked_fill(noisy < best, vocab_size).amin(dim=-1)
    if values.shape[-1] == vocab_size:
        return drawn
    # A row is settled when its last candidate is cut off: no token outside the list can survive, nor tie with one.
    unsettled = (~is_known | (cut <= values[:, -1])).nonzero().squeeze(-1)
    if len(unsettled):
        drawn[unsettled] = _draw_from_all(logits[unsettled], rows.at(unsettled))
    return drawn


def _out_of_reach(highest: Tensor) -> Tensor:
    """[n]: a token this far below the best cannot win, whatever the noise."""
    return highest - (MAX_GUMBEL - MIN_GUMBEL)


def _candidate_cut(logits: Tensor, values: Tensor, ids: Tensor, rows: RandomRows) -> tuple[Tensor, Tensor]:
    """[n]: the lowest logit the filters keep, at most the last candidate's where it lies beyond; False: not known."""
    num_candidates, vocab_size = values.shape[-1], logits.shape[-1]
    is_limited = (rows.top_k > 0) & (rows.top_k < vocab_size)
    kth = values.gather(-1, (rows.top_k.clamp(1, num_candidates) - 1)[:, None]).squeeze(-1)
    cut = values[:, 0] + rows.min_p.log()
    cut = torch.where(is_limited, torch.maximum(cut, kth), cut)
    reaches_beyond = (cut <= values[:, -1]) & (num_candidates < vocab_size)
    # top-p shares out the probability of what top-k keeps: of a top-k beyond the candidates that is not known.
    is_known = ~(is_limited & (rows.top_k > num_candidates) & reaches_beyond) | (rows.top_p >= 1.0)
    wants_p = (rows.top_p < 1.0) & is_known
    if not bool(wants_p.any()):
        return cut, is_known
    weights = (values - values[:, :1]).exp().masked_fill_(values < cut[:, None], 0.0).double()
    mass = weights / weights.cumsum(dim=-1)[:, -1:]
    spread = (wants_p & reaches_beyond).nonzero().squeeze(-1)
    if len(spread):
        scaled = logits[spread] / rows.temperature[spread, None]
        mass[spread] = _softmax_at(scaled, cut[spread], ids[spread])
    p_cut, _ = _top_p_cut(values, mass, rows.top_p)
    return torch.where(wants_p, torch.maximum(cut, p_cut), cut), is_known


def _softmax_at(scaled: Tensor, cut: Tensor, ids: Tensor) -> Tensor:
    """Float64 [n, K]: probability of `ids` among what `cut` keeps of the whole row."""
    kept = scaled.masked_fill(scaled < cut[:, None], -torch.inf)
    return kept.softmax(dim=-1).gather(-1, ids).double()


def _top_p_cut(values: Tensor, mass: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """[n]: the lowest logit of the smallest set that holds top_p, and whether these candidates hold that much.

    values, mass: [n, K], highest first; mass is each one's probability.
    """
    up_to = mass.cumsum(dim=-1)
    kept = ((up_to - mass) < top_p[:, None]).sum(dim=-1).clamp(min=1)
    return values.gather(-1, kept[:, None] - 1).squeeze(-1), up_to[:, -1] >= top_p


def _draw_from_all(logits: Tensor, rows: RandomRows) -> Tensor:
    """As `draw`, for rows whose survivors reach beyond the candidates."""
    vocab_size = logits.shape[-1]
    scaled = logits.div_(rows.temperature[:, None])
    highest = scaled.amax(dim=-1)
    cut = torch.maximum(highest + rows.min_p.log(), _kth_of_all(scaled, rows.top_k))
    cut = torch.maximum(cut, _top_p_of_all(scaled, cut, rows.top_p))
    cut = torch.maximum(cut, _out_of_reach(highest))
    drawn = torch.empty_like(rows.seed)
    step = max(1, _NOISE_CHUNK // vocab_size)
    for start in range(0, len(drawn), step):
        part = slice(start, start + step)
        noisy = gumbel_row(rows.seed[part], rows.position[part], vocab_size).add_(scaled[part])
        drawn[part] = noisy.masked_fill_(scaled[part] < cut[part, None], -torch.inf).argmax(dim=-1)
    return drawn


def _kth_of_all(scaled: Tensor, top_k: Tensor) -> Tensor:
    """[n]: the k-th highest logit, −inf where k = 0 or k ≥ V. Rows of like k share one partial sort."""
    cut = torch.full_like(scaled[:, 0], -torch.inf)
    is_limited = (top_k > 0) & (top_k < scaled.shape[-1])
    power = torch.where(is_limited, top_k.clamp(min=1).double().log2().ceil().long(), -1)
    for like in torch.unique(power[is_limited]).tolist():
        index = (power == like).nonzero().squeeze(-1)
        wanted = top_k[index]
        highest = scaled[index].topk(int(wanted.max()), dim=-1).values
        cut[index] = highest.gather(-1, wanted[:, None] - 1).squeeze(-1)
    return cut


def _top_p_of_all(scaled: Tensor, cut: Tensor, top_p: Tensor) -> Tensor:
    """[n]: the lowest logit of the smallest set of survivors of `cut` that holds top_p; −inf where top_p is 1."""
    result = torch.full_like(cut, -torch.inf)
    index = (top_p < 1.0).nonzero().squeeze(-1)
    candidates = _CANDIDATES
    while len(index):
        candidates = min(candidates * _GROWTH, scaled.shape[-1])
        rows = scaled[index]
        values, ids = rows.topk(candidates, dim=-1)
        result[index], is_reached = _top_p_cut(values, _softmax_at(rows, cut[index], ids), top_p[index])
        if candidates == scaled.shape[-1]:
            break
        index = index[~is_reached]
    return result
