"""Drawing on the model's device: parameters go there with the step's one copy, what was drawn comes back with another.

    staged = sampler.stage(plan.sample, staging.put)   # before the step's flush
    device = sampler.draw(logits, staged)              # int32, tokens first; queues work, waits for nothing
    output = sampler.finish(host, staged)              # host: `device`, copied

The rules are those of `sampler`, which draws on the CPU. Between `stage` and `finish` nothing of the batch is kept but
copies, and `finish` does not look at the logits: they may have been overwritten by then.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nightmill_kernels.argmax import argmax
from nightmill_kernels.draw import DrawRows, draw
from nightmill_worker.engine.request import TokenLogprobs
from nightmill_worker.engine.step import SampleBatch, StepOutput
from nightmill_worker.model.sampler import GREEDY_BELOW

Put = Callable[[NDArray[Any]], Tensor]
"""Takes a numpy array to the device: the tensor holds its values once the step's copy has been made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edits:
    """Which logits [R, V] are changed before the draw."""

    banned: Tensor  # int64 [B] row * V + id
    tokens: Tensor  # int32 [N] histories of the P rows that have penalties; a token t of the prompt stands as ~t
    penalised: Tensor  # int32 [N] which of the P rows
    row: Tensor  # int64 [P] of the logits
    presence: Tensor  # float32 [P]
    frequency: Tensor  # float32 [P]
    repetition: Tensor  # float32 [P]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedSample:
    """A batch on its way to the device."""

    num_rows: int  # R
    rows: DrawRows | None  # None: all are greedy
    has_filters: bool  # whether there may be rows with top-k or top-p
    edits: Edits | None
    banned_rows: frozenset[int]
    asked: NDArray[np.int64]  # [A] rows that asked for logprobs
    asked_on_device: Tensor | None  # int64 [A]
    num_logprobs: NDArray[np.int32]  # [A] how many besides the drawn one


class DeviceSampler:
    """Draws the tokens of steps, wherever their logits are."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def stage(self, batch: SampleBatch, put: Put) -> StagedSample:
        """Put what the draw needs of R rows. The batch's arrays may change as soon as this returns."""
        asked = np.flatnonzero(batch.num_logprobs >= 0)
        return StagedSample(
            num_rows=len(batch.temperature),
            rows=_draw_rows(batch, put) if batch.any_random else None,
            has_filters=bool((batch.top_k > 0).any() or (batch.top_p < 1).any()),
            edits=self._edits(batch, put) if batch.banned or batch.history else None,
            banned_rows=frozenset(batch.banned),
            asked=asked,
            asked_on_device=put(asked) if asked.size else None,
            num_logprobs=batch.num_logprobs[asked],
        )

    def draw(self, logits: Tensor, staged: StagedSample) -> Tensor:
        """Queue the draws of a step.

        Args:
            logits: [≥ R, V], any floating dtype; rows past R are padding. fp32 logits may be written to.
            staged: of the same sampler, its arrays on the logits' device.

        Returns:
            int32, on the device: the R tokens first, -1 for a row whose logits allow no draw, then what `finish` reads.
        """
        logits = logits[: staged.num_rows]
        if staged.edits is not None:
            # In fp32, as on the CPU: a step with such rows takes 4 · R · V bytes more.
            logits = logits.float().contiguous()
            _edit(logits, staged.edits)
        tokens = self._tokens(logits, staged)
        parts = [tokens]
        if staged.banned_rows:
            parts.append(logits.amax(dim=-1).view(torch.int32))
        if staged.asked_on_device is not None:
            parts += self._logprobs(logits, tokens, staged.asked_on_device, staged)
        return torch.cat(parts) if len(parts) > 1 else tokens

    def finish(self, host: NDArray[np.int32], staged: StagedSample) -> StepOutput:
        """What `draw` returned, copied to the host, as the engine takes it. The tokens are a copy."""
        num_rows = staged.num_rows
        tokens = host[:num_rows].copy()
        at = num_rows
        highest: NDArray[np.float32] | None = None
        if staged.banned_rows:
            highest = host[at : at + num_rows].view(np.float32)
            at += num_rows
        failed = {int(row): _reason(int(row), highest, staged) for row in np.flatnonzero(tokens < 0)}
        tokens[tokens < 0] = 0
        output = StepOutput(tokens=tokens, failed=failed)
        if staged.asked.size:
            output.logprobs.update(self._read_logprobs(host[at:], output, staged))
        return output

    def _tokens(self, logits: Tensor, staged: StagedSample) -> Tensor:
        if staged.rows is None:
            return argmax(logits)
        return draw(logits, staged.rows, has_filters=staged.has_filters)

    def _edits(self, batch: SampleBatch, put: Put) -> Edits:
        rows = np.array([*batch.history], dtype=np.int64)
        histories = [tokens for tokens, _ in batch.history.values()]
        prompts = np.array([prompt_length for _, prompt_length in batch.history.values()], dtype=np.int64)
        lengths = np.array([len(tokens) for tokens in histories], dtype=np.int64)
        tokens = np.concatenate(histories, dtype=np.int32) if histories else np.empty(0, np.int32)
        penalised = np.repeat(np.arange(len(rows), dtype=np.int32), lengths)
        index = np.arange(len(tokens)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        counts = [len(ids) for ids in batch.banned.values()]
        banned = np.repeat(np.array([*batch.banned], dtype=np.int64) * self._vocab_size, counts)
        if counts:
            banned += np.concatenate([*batch.banned.values()])
        return Edits(
            banned=put(banned),
            tokens=put(np.where(index < prompts[penalised], ~tokens, tokens)),
            penalised=put(penalised),
            row=put(rows),
            presence=put(batch.presence_penalty[rows]),
            frequency=put(batch.frequency_penalty[rows]),
            repetition=put(batch.repetition_penalty[rows]),
        )

    def _logprobs(self, logits: Tensor, tokens: Tensor, asked: Tensor, staged: StagedSample) -> list[Tensor]:
        logprobs = logits.index_select(0, asked).float().log_softmax(dim=-1)
        chosen = logprobs.gather(-1, tokens.index_select(0, asked).clamp(min=0).long()[:, None])
        values, ids = logprobs.topk(self._width(staged), dim=-1)
        flat = (chosen.view(torch.int32), values.view(torch.int32), ids.to(torch.int32))
        return [part.flatten() for part in flat]

    def _read_logprobs(
        self, host: NDArray[np.int32], output: StepOutput, staged: StagedSample
    ) -> dict[int, TokenLogprobs]:
        num_asked, width = len(staged.asked), self._width(staged)
        chosen = host[:num_asked].view(np.float32).tolist()
        values, ids = host[num_asked : num_asked * (1 + 2 * width)].reshape(2, num_asked, width)
        columns = (staged.asked.tolist(), staged.num_logprobs.tolist(), chosen, ids.tolist())
        return {
            row: TokenLogprobs(
                token_id=int(output.tokens[row]),
                logprob=logprob,
                top=tuple(zip(top_ids[:count], top_values[:count], strict=True)),
            )
            for row, count, logprob, top_ids, top_values in zip(*columns, values.view(np.float32).tolist(), strict=True)
            if row not in output.failed
        }

    def _width(self, staged: StagedSample) -> int:
        return min(int(staged.num_logprobs.max()), self._vocab_size)


def _draw_rows(batch: SampleBatch, put: Put) -> DrawRows:
    return DrawRows(
        temperature=put(np.where(batch.temperature < GREEDY_BELOW, np.float32(0), batch.temperature)),
        min_p=put(batch.min_p),
        top_k=put(batch.top_k),
        top_p=put(batch.top_p),
        seed=put(batch.seed.view(np.int64)),
        position=put(batch.position),
    )


def _edit(logits: Tensor, edits: Edits) -> None:
    """Bans, then penalties, into float32 logits [R, V]; see `sampler`."""
    flat = logits.view(-1)
    if edits.banned.numel():
        flat.index_fill_(0, edits.banned, -torch.inf)
    if edits.tokens.numel():
        _penalise(flat, edits, logits.shape[1])


def _penalise(flat: Tensor, edits: Edits, vocab_size: int) -> None:
    """By tensors throughout: a division by a number may become a multiplication on a GPU."""
    in_completion = edits.tokens >= 0
    ids = torch.where(in_completion, edits.tokens, ~edits.tokens).long()
    penalised = edits.penalised.long()
    counts = torch.zeros(len(edits.row) * vocab_size, dtype=torch.int32, device=flat.device)
    own = penalised * vocab_size + ids
    counts.scatter_add_(0, own, in_completion.to(torch.int32))
    count = counts.gather(0, own)
    place = edits.row[penalised] * vocab_size + ids
    value, repetition = flat.gather(0, place), edits.repetition[penalised]
    value = torch.where(value > 0, value / repetition, value * repetition)
    penalty = edits.frequency.double()[penalised] * count + edits.presence.double()[penalised]
    # Repeats of a token all write the same value.
    flat.scatter_(0, place, torch.where(count > 0, value - penalty.float(), value))


def _reason(row: int, highest: NDArray[np.float32] | None, staged: StagedSample) -> str:
    if highest is not None and row in staged.banned_rows and highest[row] == -np.inf:
        return "every token that has a probability is banned (min_tokens)"
    return "the model's logits are not finite (a NaN, +inf, or nothing but -inf)"
