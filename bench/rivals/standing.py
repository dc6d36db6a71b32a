"""From single runs to what is said in the end: medians, ranges, ratios to the best rival, shares of the bound."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.rivals.rival import Run
from nightmill_worker.bench.roofline import Bound

SAME_MODEL = 0.8
"""Greedy first tokens of two right implementations agree more often, even in bf16; of two models, hardly ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One engine on one workload over all rounds."""

    rival: str
    workload: str
    num_runs: int
    num_disturbed: int
    rows: int
    is_whole: bool
    tokens_per_s: float  # median
    lowest: float
    highest: float
    seconds: float  # median
    cpu_s: float  # median
    peak_rss_bytes: int
    rows_wrong_length: int
    same_first_token: float | None
    bound_share: float | None  # of the "sum" bound: what computing and reading in turn would take
    overlap_share: float | None  # of the "overlap" bound: as if one were free while the other lasts
    ahead: float | None
    """How many times the first engine is as fast: of the medians, over the same rows."""

    @property
    def is_valid(self) -> bool:
        """The figure may be compared: all rows as long as asked for, by the same model."""
        return not self.rows_wrong_length and (self.same_first_token is None or self.same_first_token >= SAME_MODEL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A workload's answer: ours against the best rival."""

    workload: str
    best_rival: str | None
    ratio: float | None  # of the medians
    lowest_ratio: float | None
    """Of the rounds, each engine against the other in the same round."""
    highest_ratio: float | None


def cells_of(runs: Sequence[Run], ours: str, bounds: Mapping[str, Bound]) -> list[Cell]:
    """In the order of first appearance, workload by workload."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.workload, run.rival), []).append(run)
    own = {workload: (found[0].rows, _rate(found)) for (workload, rival), found in groups.items() if rival == ours}
    workloads = list(dict.fromkeys(workload for workload, _ in groups))
    return [
        _cell(found, None if rival == ours else own.get(workload), bounds.get(workload))
        for name in workloads
        for (workload, rival), found in groups.items()
        if workload == name
    ]


def verdicts_of(cells: Sequence[Cell], runs: Sequence[Run], ours: str) -> list[Verdict]:
    """The best rival is the one with the highest median among those that answered whole workloads rightly."""
    return [_verdict(name, cells, runs, ours) for name in dict.fromkeys(cell.workload for cell in cells)]


def _verdict(workload: str, cells: Sequence[Cell], runs: Sequence[Run], ours: str) -> Verdict:
    here = [cell for cell in cells if cell.workload == workload]
    own = next((cell for cell in here if cell.rival == ours), None)
    rivals = [c for c in here if c.rival != ours and c.is_valid and own is not None and c.rows == own.rows]
    if own is None or not own.is_valid or not rivals:
        return Verdict(workload=workload, best_rival=None, ratio=None, lowest_ratio=None, highest_ratio=None)
    best = max(rivals, key=lambda cell: cell.tokens_per_s)
    by_round = {(run.rival, run.round): run.tokens_per_s for run in runs if run.workload == workload}
    ratios = [
        rate / by_round[best.rival, number]
        for (rival, number), rate in by_round.items()
        if rival == ours and (best.rival, number) in by_round
    ]
    return Verdict(
        workload=workload,
        best_rival=best.rival,
        ratio=own.tokens_per_s / best.tokens_per_s,
        lowest_ratio=min(ratios, default=None),
        highest_ratio=max(ratios, default=None),
    )


def _cell(runs: Sequence[Run], own: tuple[int, float] | None, bound: Bound | None) -> Cell:
    rates = [run.tokens_per_s for run in runs]
    is_whole = all(run.is_whole for run in runs)
    seconds = statistics.median(run.seconds for run in runs)
    agreements = [run.same_first_token for run in runs if run.same_first_token is not None]
    return Cell(
        rival=runs[0].rival,
        workload=runs[0].workload,
        num_runs=len(runs),
        num_disturbed=sum(run.is_disturbed for run in runs),
        rows=runs[0].rows,
        is_whole=is_whole,
        tokens_per_s=statistics.median(rates),
        lowest=min(rates),
        highest=max(rates),
        seconds=seconds,
        cpu_s=statistics.median(run.cpu_s for run in runs),
        peak_rss_bytes=max(run.peak_rss_bytes for run in runs),
        rows_wrong_length=max(run.rows_wrong_length for run in runs),
        same_first_token=min(agreements, default=None),
        bound_share=bound.sum_s / seconds if bound is not None and is_whole else None,
        overlap_share=bound.overlap_s / seconds if bound is not None and is_whole else None,
        ahead=own[1] / statistics.median(rates) if own is not None and own[0] == runs[0].rows else None,
    )


def _rate(runs: Sequence[Run]) -> float:
    return statistics.median(run.tokens_per_s for run in runs)
