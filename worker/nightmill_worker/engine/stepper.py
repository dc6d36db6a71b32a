"""Takes steps: decide, pack, run, commit. One after the other; run_ahead.py overlaps them."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from nightmill_worker.engine.accounting import Accounting
from nightmill_worker.engine.commit import Ending, advance, receive
from nightmill_worker.engine.flight import FlightRecorder
from nightmill_worker.engine.frame import Frame
from nightmill_worker.engine.packing import Packer
from nightmill_worker.engine.preemption import PreemptionCost
from nightmill_worker.engine.residency import Residency
from nightmill_worker.engine.running_table import Rows, RunningTable
from nightmill_worker.engine.scheduler import Schedule
from nightmill_worker.engine.stats import Counters
from nightmill_worker.engine.step import Runner, StepOutput, StepPlan


class Decide(Protocol):
    """Says what the next step computes."""

    def __call__(self, *, ahead: bool = False) -> Schedule:
        """`ahead`: while the step before is in flight."""
        ...


@dataclass(frozen=True, slots=True)
class StepParts:
    """What a stepper works with."""

    table: RunningTable
    packer: Packer
    residency: Residency
    accounting: Accounting
    cost: PreemptionCost
    counters: Counters
    decide: Decide
    end: Callable[[Ending], None]


class Stepper:
    """One step at a time: while it runs, the engine waits."""

    def __init__(self, runner: Runner, parts: StepParts) -> None:
        self._runner = runner
        self._parts = parts
        self.flight: FlightRecorder | None = None

    @property
    def num_in_flight(self) -> int:
        """Steps submitted that have not been committed."""
        return 0

    def step(self, started: float) -> bool:
        """Commit one step; False when nothing was computed for anyone who is still there.

        Args:
            started: When the time began that deciding is charged for, by time.perf_counter.
        """
        parts, counters = self._parts, self._parts.counters
        schedule = parts.decide()
        if not len(schedule.rows):
            return False
        decided = time.perf_counter()
        plan = parts.packer.pack(schedule, counters.steps)
        if self.flight is not None:
            self.flight.begin(plan, schedule.rows)
        planned = time.perf_counter()
        output = self._runner.run(plan)
        ran = time.perf_counter()
        if self.flight is not None:
            self.flight.end()
        seconds = ran - planned if output.seconds is None else output.seconds
        parts.cost.observe(plan.num_tokens, plan.num_sequences, seconds)
        self._finish(self._begin(schedule, plan), output)
        counters.plan_s += decided - started
        counters.build_s += planned - decided
        counters.run_s += ran - planned
        counters.device_s += seconds
        counters.commit_s += time.perf_counter() - ran
        return True

    def settle(self) -> None:
        """Commit what is in flight."""

    def _begin(self, schedule: Schedule, plan: StepPlan) -> Frame:
        """Count a step, before its tokens are known."""
        table, draws = self._parts.table, plan.sample.sequence
        again = self._parts.accounting.begin(schedule, plan, is_ahead=self.num_in_flight > 0)
        rows, counts = schedule.rows[: schedule.num_real], schedule.counts[: schedule.num_real]
        drawing = rows[draws]
        advance(table, rows, counts, drawing)
        return Frame(
            step=plan.step,
            rows=rows,
            counts=counts,
            again=again,
            num_computed=table.num_computed[rows],
            draws=draws,
            drawing=drawing,
            positions=plan.sample.position,
            num_void=schedule.num_padding,
        )

    def _finish(self, frame: Frame, output: StepOutput) -> None:
        """Its tokens are here."""
        parts = self._parts
        rows, num_computed = frame.rows, frame.num_computed
        drawn = np.delete(frame.drawing, list(output.failed)) if output.failed else frame.drawing
        parts.accounting.complete(rows, frame.counts, frame.again, drawn, frame.num_void)
        endings = receive(parts.table, frame.drawing, frame.positions, output)
        if output.failed:
            is_sound = ~np.isin(rows, _failed_rows(endings))
            rows, num_computed = rows[is_sound], num_computed[is_sound]
        # Before the endings: a sequence that ends leaves its last full page to the index.
        parts.residency.publish(rows, num_computed)
        for ending in endings:
            parts.end(ending)
        parts.counters.steps += 1


def _failed_rows(endings: list[Ending]) -> Rows:
    return np.array([ending.row for ending in endings if ending.error is not None], np.int64)
