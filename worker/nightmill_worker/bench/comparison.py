"""Several engines over several workloads, interleaved, medians over rounds."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from nightmill_worker.bench.measurement import Measurement
from nightmill_worker.bench.roofline import Bound
from nightmill_worker.bench.workload import Workload


class Contender(Protocol):
    """An engine that can answer a workload."""

    def run(self, workload: Workload, progress: Callable[[int], None] | None = None) -> Measurement:
        """Answer every row of the workload, timed."""
        ...


OnStart = Callable[[Contender, Workload, int], Callable[[int], None] | None]


@dataclass(frozen=True, slots=True)
class Cell:
    """One engine on one workload: the medians over rounds, and the spread."""

    engine: str
    workload: str
    seconds: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    lowest_tokens_per_s: float
    highest_tokens_per_s: float
    rows_wrong_length: int
    detail: dict[str, float | int]
    bound_share: float | None  # of the "sum" bound


def compare(
    contenders: Sequence[Contender],
    workloads: Sequence[Workload],
    rounds: int,
    on_start: OnStart,
) -> Iterable[Measurement]:
    """Yield measurements, engines taking turns inside each round so that a noisy minute hits them all."""
    for number in range(rounds):
        for workload in workloads:
            for contender in contenders:
                yield contender.run(workload, on_start(contender, workload, number))


def summarise(measurements: Sequence[Measurement], bounds: dict[str, Bound]) -> list[Cell]:
    """Medians by (workload, engine), in the order of first appearance."""
    groups: dict[tuple[str, str], list[Measurement]] = {}
    for m in measurements:
        groups.setdefault((m.workload, m.engine), []).append(m)
    return [_cell(runs, bounds.get(workload)) for (workload, _), runs in groups.items()]


def _cell(runs: list[Measurement], bound: Bound | None) -> Cell:
    rates = [m.output_tokens_per_s for m in runs]
    seconds = statistics.median(m.seconds for m in runs)
    return Cell(
        engine=runs[0].engine,
        workload=runs[0].workload,
        seconds=seconds,
        output_tokens_per_s=statistics.median(rates),
        total_tokens_per_s=statistics.median(m.total_tokens_per_s for m in runs),
        lowest_tokens_per_s=min(rates),
        highest_tokens_per_s=max(rates),
        rows_wrong_length=max(m.rows_wrong_length for m in runs),
        detail=runs[-1].detail,
        bound_share=bound.sum_s / seconds if bound is not None else None,
    )
