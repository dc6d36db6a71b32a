"""Applies a step to the running table, and finds the sequences that it ended.

In two parts, because a step that runs ahead is counted when it is submitted (`advance`), and known later (`receive`).
"""

from dataclasses import dataclass

import numpy as np

from nightmill_worker.engine.request import FinishReason
from nightmill_worker.engine.running_table import Rows, RunningTable
from nightmill_worker.engine.step import StepOutput


@dataclass(frozen=True, slots=True)
class Ending:
    """A sequence that a step ended."""

    row: int
    reason: FinishReason
    stop_match: str | int | None = None
    error: str | None = None


def advance(table: RunningTable, rows: Rows, counts: Rows, drawing: Rows) -> None:
    """Count what a step computes, and a token for each row that draws one; which token is not known yet."""
    table.num_computed[rows] += counts
    _cross_holes(table, rows)
    table.num_tokens[drawing] += 1


def receive(table: RunningTable, rows: Rows, positions: Rows, output: StepOutput) -> list[Ending]:
    """Fill in what these rows have drawn, and report endings; rows stay bound.

    Args:
        table: Advanced for this step, and maybe for the next one.
        rows: [R] each drew a token.
        positions: [R] the token's place in its sequence.
        output: Of these R draws.
    """
    table.tokens[rows, positions] = output.tokens
    for i, logprobs in output.logprobs.items():
        kept = table.sequence(int(rows[i])).logprobs
        if kept is not None and i not in output.failed:
            kept.append(logprobs)
    return _endings(table, rows, positions, output)


def _cross_holes(table: RunningTable, rows: Rows) -> None:
    """What was lost before the restored pages is computed again: go on behind them."""
    across = rows[table.num_computed[rows] == table.hole_end[rows]]  # a row that has computed is never at 0
    if len(across):
        table.num_computed[across] = table.hole_to[across]
        table.hole_end[across] = table.hole_to[across] = 0


def _endings(table: RunningTable, rows: Rows, positions: Rows, output: StepOutput) -> list[Ending]:
    armed = positions >= table.min_total[rows]
    stopped = (table.stop_ids[rows] == output.tokens[:, None]).any(axis=1) & armed
    at_limit = positions + 1 >= table.max_total[rows]
    concerned = stopped | at_limit | table.has_stop_strings[rows]
    endings: list[Ending] = []
    indices = np.flatnonzero(concerned).tolist()
    for i in sorted({*indices, *output.failed}) if output.failed else indices:
        row, token = int(rows[i]), int(output.tokens[i])
        if i in output.failed:
            table.num_tokens[row] -= 1  # the draw is void
            endings.append(Ending(row, FinishReason.ERROR, error=output.failed[i]))
            continue
        stop = table.sequence(row).stop
        match = stop.push(token, armed=bool(armed[i])) if stop is not None else None
        if stopped[i]:
            endings.append(Ending(row, FinishReason.STOP, token))
        elif match is not None:
            endings.append(Ending(row, FinishReason.STOP, match))
        elif at_limit[i]:
            endings.append(Ending(row, FinishReason.LENGTH))
    return endings
