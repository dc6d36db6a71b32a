"""Draw one token for each row of logits: bans → penalties → temperature → min-p → top-k → top-p → draw.

Every row's result depends on that row alone: a mixed batch equals its rows drawn one by one. Filters cut at a logit
value, so tokens that tie with the last one kept are kept too.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nightmill_kernels.argmax import argmax
from nightmill_worker.engine.request import TokenLogprobs
from nightmill_worker.engine.step import SampleBatch, StepOutput
from nightmill_worker.model.philox import MAX_GUMBEL, MIN_GUMBEL, gumbel_at, gumbel_row

GREEDY_BELOW = 1e-5
"""A temperature below it takes the highest logit, ties to the lowest token id."""

# First guess at how many candidates hold top_p of the probability, and what it grows by where they do not.
_TOP_P_CANDIDATES = 128
_TOP_P_GROWTH = 8
# Rows with more survivors than this share of the vocabulary draw noise for all of it, four ids per Philox block.
_DENSE_SHARE = 0.25
# Elements of noise computed at once: the intermediate words stay in the cache.
_NOISE_CHUNK = 1 << 17


@dataclass(frozen=True, slots=True)
class _RandomRows:
    """The parameters of the rows that draw at random: 1-D tensors of equal length."""

    temperature: Tensor  # float32
    min_p: Tensor  # float32
    top_k: Tensor  # int64, 0 = all
    top_p: Tensor  # float32
    seed: Tensor  # int64: the bits of the unsigned seed
    position: Tensor  # int64

    @classmethod
    def of(cls, batch: SampleBatch, rows: NDArray[np.int64], device: torch.device) -> "_RandomRows":
        """Select `rows` of the batch."""
        return cls(
            temperature=torch.from_numpy(batch.temperature[rows]).to(device),
            min_p=torch.from_numpy(batch.min_p[rows]).to(device),
            top_k=torch.from_numpy(batch.top_k[rows].astype(np.int64)).to(device),
            top_p=torch.from_numpy(batch.top_p[rows]).to(device),
            seed=torch.from_numpy(batch.seed[rows].view(np.int64)).to(device),
            position=torch.from_numpy(batch.position[rows].astype(np.int64)).to(device),
        )


def sample(logits: Tensor, batch: SampleBatch) -> StepOutput:
    """Draw a token for every row.

    Args:
        logits: [R, V], any floating dtype; bans and penalties may be written into it.
        batch: the rows' parameters.

    Returns:
        Tokens, the logprobs that were asked for, and the rows whose logits allow no draw (their token is 0).
    """
    asked = batch.num_logprobs >= 0
    if batch.any_random or batch.banned or batch.history or asked.any():
        logits = logits.float()
    _ban(logits, batch)
    _penalise(logits, batch)
    tokens: NDArray[np.int32] = argmax(logits).cpu().numpy()
    is_drawable = tokens >= 0
    failed = {int(row): _reason(logits[row], int(row), batch) for row in np.flatnonzero(~is_drawable)}
    tokens[~is_drawable] = 0
    if batch.any_random:
        rows = np.flatnonzero((batch.temperature >= GREEDY_BELOW) & is_drawable)
        if rows.size:
            drawn = _draw(logits[torch.from_numpy(rows)], _RandomRows.of(batch, rows, logits.device))
            tokens[rows] = drawn.cpu().numpy()
    logprobs = _logprobs(logits, tokens, batch, np.flatnonzero(asked & is_drawable))
    return StepOutput(tokens=tokens, logprobs=logprobs, failed=failed)


def _reason(logits: Tensor, row: int, batch: SampleBatch) -> str:
    best = float(logits.max())
    if best == -np.inf and row in batch.banned:
        return "every token that has a probability is banned (min_tokens)"
    return f"the model's logits are not finite (highest: {best})"


def _ban(logits: Tensor, batch: SampleBatch) -> None:
    for row, ids in batch.banned.items():
        logits[row, torch.from_numpy(ids.astype(np.int64))] = -torch.inf


def _penalise(logits: Tensor, batch: SampleBatch) -> None:
    """Repetition looks at prompt and completion; presence and frequency at the completion, as OpenAI defines them."""
    vocab_size = logits.shape[-1]
    for row, (history, prompt_length) in batch.history.items():
        line = logits[row]
        seen = torch.from_numpy(history.astype(np.int64))
        repetition = float(batch.repetition_penalty[row])
        if repetition != 1.0:
            ids = torch.unique(seen)
            values = line[ids]
            line[ids] = torch.where(values > 0, values / repetition, values * repetition)
        presence, frequency = float(batch.presence_penalty[row]), float(batch.frequency_penalty[row])
        if presence or frequency:
            counts = torch.bincount(seen[prompt_length:], minlength=vocab_size).to(line)
            line -= frequency * counts + presence * (counts > 0)


def _draw(scaled: Tensor, rows: _RandomRows) -> Tensor:
    """int64 [n]: argmax of logit / temperature + Gumbel noise over what the filters leave; `scaled` is overwritten."""
    scaled /= rows.temperature[:, None]
    highest = scaled.amax(dim=-1)
    cut = torch.maximum(highest + rows.min_p.log(), _top_k_cut(scaled, rows.top_k))
    cut = torch.maximum(cut, _top_p_cut(scaled, cut, rows.top_p))
    # What lies further below the maximum than any noise can make up for need not be looked at.
    cut = torch.maximum(cut, highest - (MAX_GUMBEL - MIN_GUMBEL))
    survives = scaled >= cut[:, None]
    is_dense = survives.sum(dim=-1) > _DENSE_SHARE * scaled.shape[-1]
    drawn = torch.empty_like(rows.seed)
    for selected, draw in ((is_dense, _draw_dense), (~is_dense, _draw_sparse)):
        index = selected.nonzero().squeeze(-1)
        if len(index):
            drawn[index] = draw(scaled, survives, rows, index)
    return drawn


def _top_k_cut(scaled: Tensor, top_k: Tensor) -> Tensor:
    """[n]: the k-th highest logit, −inf where k = 0 or k ≥ V. Rows of like k share one partial sort."""
    cut = torch.full_like(scaled[:, 0], -torch.inf)
    limited = (top_k > 0) & (top_k < scaled.shape[-1])
    bucket = torch.where(limited, top_k.clamp(min=64).double().log2().ceil().long(), -1)
    for power in torch.unique(bucket).tolist():
        if power < 0:
            continue
        index = (bucket == power).nonzero().squeeze(-1)
        wanted = top_k[index]
        highest = scaled[index].topk(int(wanted.max()), dim=-1).values
        cut[index] = highest.gather(-1, wanted[:, None] - 1).squeeze(-1)
    return cut


def _top_p_cut(scaled: Tensor, cut: Tensor, top_p: Tensor) -> Tensor:
    """[n]: the lowest logit of the smallest set of survivors of `cut` that holds top_p of their probability."""
    result = torch.full_like(cut, -torch.inf)
    index = (top_p < 1.0).nonzero().squeeze(-1)
    candidates = _TOP_P_CANDIDATES
    while len(index):
        candidates = min(candidates, scaled.shape[-1])
        logits = scaled[index]
        logits[logits < cut[index, None]] = -torch.inf
        values, ids = logits.topk(candidates, dim=-1)
        # Softmax over the whole row, never over the candidates: the result must not depend on how many there are.
        mass = logits.softmax(dim=-1).gather(-1, ids).double()
        up_to = mass.cumsum(dim=-1)
        kept = ((up_to - mass) < top_p[index, None]).sum(dim=-1).clamp(min=1)
        result[index] = values.gather(-1, kept[:, None] - 1).squeeze(-1)
        if candidates == scaled.shape[-1]:
            break
        index = index[up_to[:, -1] < top_p[index]]
        candidates *= _TOP_P_GROWTH
    return result


def _draw_dense(scaled: Tensor, survives: Tensor, rows: _RandomRows, index: Tensor) -> Tensor:
    vocab_size = scaled.shape[-1]
    drawn = torch.empty_like(index)
    step = max(1, _NOISE_CHUNK // vocab_size)
    for start in range(0, len(index), step):
        part = index[start : start + step]
        noisy = gumbel_row(rows.seed[part], rows.position[part], vocab_size)
        noisy += scaled[part]
        drawn[start : start + step] = noisy.masked_fill_(~survives[part], -torch.inf).argmax(dim=-1)
    return drawn


def _draw_sparse(scaled: Tensor, survives: Tensor, rows: _RandomRows, index: Tensor) -> Tensor:
    """As dense, with noise for the survivors only."""
    row, token = survives[index].nonzero(as_tuple=True)
    owner = index[row]
    noisy = scaled[owner, token] + gumbel_at(rows.seed[owner], rows.position[owner], token)
    best = torch.full_like(scaled[index, 0], -torch.inf).scatter_reduce_(0, row, noisy, "amax")
    wins = noisy == best[row]
    nobody = torch.full_like(index, scaled.shape[-1])
    return nobody.scatter_reduce_(0, row[wins], token[wins], "amin")


def _logprobs(
    logits: Tensor, tokens: NDArray[np.int32], batch: SampleBatch, rows: NDArray[np.int64]
) -> dict[int, TokenLogprobs]:
    if not rows.size:
        return {}
    counts = batch.num_logprobs[rows]
    logprobs = logits[torch.from_numpy(rows)].log_softmax(dim=-1)
    chosen = logprobs.gather(-1, torch.from_numpy(tokens[rows].astype(np.int64))[:, None].to(logits.device))
    values, ids = logprobs.topk(min(int(counts.max()), logits.shape[-1]), dim=-1)
    return {
        int(row): TokenLogprobs(
            token_id=int(tokens[row]),
            logprob=logprob,
            top=tuple(zip(top_ids[:count], top_values[:count], strict=True)),
        )
        for row, count, (logprob,), top_ids, top_values in zip(
            rows, counts, chosen.tolist(), ids.tolist(), values.tolist(), strict=True
        )
    }
