"""How likely a model holds a text to be: its loss at every token of rows that are given, many rows in a step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from nightmill_worker.engine.step import SampleBatch, StepPlan
from nightmill_worker.model.runner import ModelRunner

STEP_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Scores:
    """Of one row of n tokens, at its tokens 1 … n - 1, each after all that stand before it."""

    loss: NDArray[np.float64]  # -log p of the token, in nats
    best: NDArray[np.int64]  # the token that was likeliest


def score(runner: ModelRunner, rows: Sequence[Sequence[int]]) -> list[Scores]:
    """Scores of each row; a row has at least two tokens and fits a step and the pool."""
    out = []
    for batch in _batches(rows):
        logits = runner.compute_logits(_plan(batch, runner.pool.page_size))
        first = 0
        for row in batch:
            own = logits[first : first + len(row) - 1]
            first += len(row)
            loss = own.logsumexp(dim=-1) - own.gather(1, torch.tensor(row[1:]).unsqueeze(1)).squeeze(1)
            out.append(Scores(loss.double().numpy(), own.argmax(dim=-1).numpy()))
    return out


def _batches(rows: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    batch: list[Sequence[int]] = []
    for row in rows:
        if batch and sum(map(len, batch)) + len(row) > STEP_TOKENS:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _plan(rows: Sequence[Sequence[int]], page_size: int) -> StepPlan:
    """A step that computes all rows from their first token on, and wants logits at every token."""
    lengths = np.array([len(row) for row in rows], np.int32)
    widths = -(-lengths // page_size)
    tables = np.zeros((len(rows), widths.max()), np.int32)
    for row, (start, width) in enumerate(zip(np.cumsum(widths) - widths, widths, strict=True)):
        tables[row, :width] = 1 + start + np.arange(width)
    sequence = np.repeat(np.arange(len(rows), dtype=np.int32), lengths)
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
    tokens = len(positions)

    def full(value: float, dtype: type) -> np.ndarray:
        return np.full(tokens, value, dtype)

    return StepPlan(
        step=0,
        token_ids=np.concatenate([np.array(row, np.int32) for row in rows]),
        positions=positions,
        slots=tables[sequence, positions // page_size].astype(np.int64) * page_size + positions % page_size,
        query_starts=np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
        context_lens=lengths,
        page_tables=tables,
        sample=SampleBatch(
            sequence=sequence,
            token_index=np.arange(tokens, dtype=np.int32),
            position=(positions + 1).astype(np.int64),
            seed=full(0, np.uint64),
            temperature=full(0, np.float32),
            top_k=full(0, np.int32),
            top_p=full(1, np.float32),
            min_p=full(0, np.float32),
            presence_penalty=full(0, np.float32),
            frequency_penalty=full(0, np.float32),
            repetition_penalty=full(1, np.float32),
            num_logprobs=full(-1, np.int32),
            any_random=False,
        ),
    )
