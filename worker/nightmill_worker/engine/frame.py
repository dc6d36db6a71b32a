"""A step that was submitted: what has to be remembered of it until its tokens are there."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from nightmill_worker.engine.running_table import Rows, RunningTable
from nightmill_worker.engine.step import StepOutput


@dataclass(slots=True, kw_only=True)  # not frozen: one is made in each step, and freezing doubles what that costs
class Frame:
    """Rows of a step, without padding, as they were when the table was advanced for it."""

    step: int
    rows: Rows  # [S]
    counts: Rows  # [S] tokens computed
    again: Rows | None  # [S] of those, computed before; None: none
    num_computed: Rows  # [S] afterwards
    draws: NDArray[np.int32]  # [R] those that draw, by their index in `rows`
    drawing: Rows  # [R] the same rows
    positions: Rows  # [R] place of the drawn token in its sequence
    num_void: int  # tokens computed for rows that have ended

    def still_there(self, epochs: Rows, table: RunningTable, output: StepOutput) -> "tuple[Frame, StepOutput]":
        """Without the rows whose sequence has ended since: what they computed and drew is nobody's.

        `epochs`: [S] of the rows when the step was submitted; another one now means another sequence, or none.
        """
        is_there = table.epoch[self.rows] == epochs
        if is_there.all():
            return self, output
        index = (np.cumsum(is_there) - 1).astype(np.int32)
        kept = np.flatnonzero(is_there[self.draws])
        place = {i: j for j, i in enumerate(kept.tolist())}
        frame = replace(
            self,
            rows=self.rows[is_there],
            counts=self.counts[is_there],
            again=None if self.again is None else self.again[is_there],
            num_computed=self.num_computed[is_there],
            draws=index[self.draws[kept]],
            drawing=self.drawing[kept],
            positions=self.positions[kept],
            num_void=self.num_void + int(self.counts[~is_there].sum()),
        )
        return frame, replace(
            output,
            tokens=output.tokens[kept],
            logprobs={place[i]: value for i, value in output.logprobs.items() if i in place},
            failed={place[i]: why for i, why in output.failed.items() if i in place},
        )
