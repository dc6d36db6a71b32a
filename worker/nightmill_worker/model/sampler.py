"""Draw one token for each row of logits: bans → penalties → temperature → min-p → top-k → top-p → draw.

Every row's result depends on that row alone: a mixed batch equals its rows drawn one by one. Filters cut at a logit
value, so tokens that tie with the last one kept are kept too.
"""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nightmill_kernels.argmax import argmax
from nightmill_kernels.draw import DrawRows, draw
from nightmill_worker.engine.request import TokenLogprobs
from nightmill_worker.engine.step import SampleBatch, StepOutput

GREEDY_BELOW = 1e-5
"""A temperature below it takes the highest logit, ties to the lowest token id."""

# Logits worked on at once, as float32: a few MB stay in the cache, and a large batch needs no second copy of itself.
_CHUNK_ELEMENTS = 1 << 19
_ARRAYS = tuple(f.name for f in fields(SampleBatch) if f.name not in ("any_random", "history", "banned"))


def sample(logits: Tensor, batch: SampleBatch) -> StepOutput:
    """Draw a token for every row.

    Args:
        logits: [R, V], any floating dtype; bans and penalties may be written into it.
        batch: the rows' parameters.

    Returns:
        Tokens, the logprobs that were asked for, and the rows whose logits allow no draw (their token is 0).
    """
    num_rows, vocab_size = logits.shape
    if not (batch.banned or batch.history or (batch.num_logprobs >= 0).any()):
        return _draw(logits, batch)
    output = StepOutput(tokens=np.empty(num_rows, np.int32))
    step = max(1, _CHUNK_ELEMENTS // vocab_size)
    for start in range(0, num_rows, step):
        part = _sample_chunk(logits[start : start + step].float(), _rows(batch, start, start + step))
        output.tokens[start : start + step] = part.tokens
        output.logprobs.update({start + row: value for row, value in part.logprobs.items()})
        output.failed.update({start + row: value for row, value in part.failed.items()})
    return output


def _rows(batch: SampleBatch, start: int, stop: int) -> SampleBatch:
    """The batch of rows [start, stop)."""
    sliced: dict[str, Any] = {name: getattr(batch, name)[start:stop] for name in _ARRAYS}
    return replace(
        batch,
        **sliced,
        history={row - start: value for row, value in batch.history.items() if start <= row < stop},
        banned={row - start: value for row, value in batch.banned.items() if start <= row < stop},
    )


def _sample_chunk(logits: Tensor, batch: SampleBatch) -> StepOutput:
    _ban(logits, batch)
    _penalise(logits, batch)
    output = _draw(logits, batch)
    is_drawn = np.ones(len(output.tokens), dtype=bool)
    is_drawn[list(output.failed)] = False
    asked = np.flatnonzero((batch.num_logprobs >= 0) & is_drawn)
    output.logprobs.update(_logprobs(logits, output.tokens, batch, asked))
    return output


def _draw(logits: Tensor, batch: SampleBatch) -> StepOutput:
    drawn = draw(logits, _draw_rows(batch, logits.device)) if batch.any_random else argmax(logits)
    tokens: NDArray[np.int32] = drawn.cpu().numpy()
    failed = {int(row): _reason(logits[row], int(row), batch) for row in np.flatnonzero(tokens < 0)}
    tokens[tokens < 0] = 0
    return StepOutput(tokens=tokens, failed=failed)


def _draw_rows(batch: SampleBatch, device: torch.device) -> DrawRows:
    temperature = np.where(batch.temperature < GREEDY_BELOW, np.float32(0), batch.temperature)
    values = (temperature, batch.min_p, batch.top_k, batch.top_p, batch.seed.view(np.int64), batch.position)
    # Copies: the batch may be views of buffers that are not to be written to, which torch warns about.
    temperature_, min_p, top_k, top_p, seed, position = (torch.from_numpy(v.copy()).to(device) for v in values)
    return DrawRows(
        temperature=temperature_, min_p=min_p, top_k=top_k, top_p=top_p, seed=seed, position=position.long()
    )


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
    for row, (history, prompt_length) in batch.history.items():
        line = logits[row]
        repetition = float(batch.repetition_penalty[row])
        if repetition != 1.0:
            ids = torch.from_numpy(np.unique(history).astype(np.int64))
            values = line[ids]
            line[ids] = torch.where(values > 0, values / repetition, values * repetition)
        presence, frequency = float(batch.presence_penalty[row]), float(batch.frequency_penalty[row])
        if presence or frequency:
            drawn, counts = np.unique(history[prompt_length:], return_counts=True)
            penalty = torch.from_numpy((frequency * counts + presence).astype(np.float32)).to(line.device)
            line[torch.from_numpy(drawn.astype(np.int64))] -= penalty


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
