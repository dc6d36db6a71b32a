"""Steps that overlap: while the device runs a step, the host packs the next one and commits the one before.

    host    plan 0 · submit │ plan 1 · submit │ collect 0 · commit 0 │ plan 2 · submit │ collect 1 · commit 1 │ …
    device                  │── step 0 ───────────────│── step 1 ───────────────│── step 2 ───────────────

A step is counted in the running table when it is submitted, as if its tokens were there. Which they are only the
device knows: the next step names them by their place in the draws of the step before. What is not known is whether a
row has ended by a stop. It is scheduled again all the same; when it turns out to have ended, what the second step
computed for it is dropped (its row's epoch is another one), and its pages come free when that step has ended.

Everything else that a step's tokens could change waits for them: see `Scheduler.schedule`.
Why it is so, and what was left out: docs/adr/0003-run-ahead.md.
"""

import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from nightmill_worker.engine.frame import Frame
from nightmill_worker.engine.running_table import Rows
from nightmill_worker.engine.scheduler import Schedule
from nightmill_worker.engine.step import Runner, RunsAhead
from nightmill_worker.engine.stepper import StepParts, Stepper

_MAX_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class _Submitted:
    frame: Frame
    epochs: Rows  # [S] of its rows
    num_tokens: int  # padding included
    num_sequences: int
    at: float  # when the device could begin, by time.perf_counter


class AheadStepper(Stepper):
    """Keeps a step in flight between calls."""

    def __init__(self, runner: Runner, ahead: RunsAhead, parts: StepParts) -> None:
        """`runner` and `ahead` are the same thing."""
        super().__init__(runner, parts)
        self._ahead = ahead
        self._in_flight: deque[_Submitted] = deque()
        self._collected_at = 0.0

    @property
    def num_in_flight(self) -> int:
        """See Stepper."""
        return len(self._in_flight)

    def step(self, started: float) -> bool:
        """See Stepper."""
        while len(self._in_flight) < _MAX_IN_FLIGHT:
            is_ahead = bool(self._in_flight)
            schedule = self._parts.decide(ahead=is_ahead)
            decided = time.perf_counter()
            if is_ahead or len(schedule.rows):
                self._parts.counters.plan_s += decided - started
            if not len(schedule.rows):
                break
            self._submit(schedule, decided)
            started = time.perf_counter()
        return bool(self._in_flight) and self._collect()

    def settle(self) -> None:
        """See Stepper."""
        while self._in_flight:
            self._collect()

    def _submit(self, schedule: Schedule, decided: float) -> None:
        parts, counters = self._parts, self._parts.counters
        is_ahead = bool(self._in_flight)
        plan = parts.packer.pack(schedule, counters.steps + len(self._in_flight), is_ahead=is_ahead)
        if self.flight is not None:
            self.flight.begin(plan, schedule.rows, num_before=len(self._in_flight))
        planned = time.perf_counter()
        self._ahead.submit(plan)
        submitted = time.perf_counter()
        frame = self._begin(schedule, plan)
        self._mark(frame)
        epochs = parts.table.epoch[frame.rows]
        self._in_flight.append(_Submitted(frame, epochs, plan.num_tokens, plan.num_sequences, planned))
        counters.build_s += planned - decided + (time.perf_counter() - submitted)
        counters.run_s += submitted - planned
        counters.steps_ahead += is_ahead

    def _mark(self, frame: Frame) -> None:
        table, drawing = self._parts.table, frame.drawing
        table.last_step[frame.rows] = frame.step
        table.num_pending[drawing] += 1
        table.draw_index[drawing] = np.arange(len(drawing))

    def _collect(self) -> bool:
        parts, counters = self._parts, self._parts.counters
        began = time.perf_counter()
        output = self._ahead.collect()
        ended = time.perf_counter()
        step = self._in_flight.popleft()
        if self.flight is not None and not self._in_flight:
            self.flight.end()
        seconds = ended - max(step.at, self._collected_at) if output.seconds is None else output.seconds
        self._collected_at = ended
        parts.cost.observe(step.num_tokens, step.num_sequences, seconds)
        parts.residency.fences.land(step.frame.step)
        frame, output = step.frame.still_there(step.epochs, parts.table, output)
        parts.table.num_pending[frame.drawing] -= 1
        self._finish(frame, output)
        counters.run_s += ended - began
        counters.device_s += seconds
        counters.commit_s += time.perf_counter() - ended
        return len(frame.rows) > 0
