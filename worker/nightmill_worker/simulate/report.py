"""What a simulation says: JSON, a table, events."""

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from nightmill.states import Tier
from nightmill_worker.simulate.cost_model import CostModel
from nightmill_worker.simulate.simulation import SimulationResult
from nightmill_worker.simulate.trace import Trace, best_saved_tokens

EVENT_COLUMNS = ("request", "admit_step", "first_token_step", "finish_step", "preempted")


@dataclass(frozen=True, slots=True)
class Wait:
    """Seconds from arrival to admission: median and 99th percentile."""

    p50: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyReport:
    """The figures of one policy; the field names are the JSON keys."""

    steps: int
    seconds: float
    output_tokens: int
    mean_batch: float  # rows that compute something in a step
    page_occupancy_mean: float  # pages held / pool pages, over all steps
    preemptions: int
    recomputed_tokens: int
    prefill_tokens_computed: int
    prefill_tokens_saved: int
    prefill_tokens_saved_best: int
    wait_s: dict[str, Wait]  # by tier
    bound_seconds: float
    failed_requests: int

    def as_json(self) -> dict[str, object]:
        """Plain values; floats are rounded to what they mean."""
        record = asdict(self)
        for name in ("seconds", "mean_batch", "page_occupancy_mean", "bound_seconds"):
            record[name] = round(record[name], 6)
        return record


def policy_report(
    trace: Trace, result: SimulationResult, cost: CostModel, *, max_num_seqs: int, page_size: int
) -> PolicyReport:
    """Sum up one policy's run. Rows that can never run are left out of bound and output."""
    ran = [i for i in range(len(trace)) if i not in result.failed]
    rows = Trace(tuple(trace.rows[i] for i in ran))
    output_lens = [result.output_lens[i] for i in ran]
    stats, recorder = result.stats, result.recorder
    return PolicyReport(
        steps=recorder.steps,
        seconds=recorder.clock_s,
        output_tokens=sum(output_lens),
        mean_batch=stats.mean_batch,
        page_occupancy_mean=float(np.mean(recorder.pages)) / result.num_pages if recorder.pages else 0.0,
        preemptions=stats.preemptions,
        recomputed_tokens=stats.recomputed_tokens,
        prefill_tokens_computed=stats.prompt_tokens - stats.cached_tokens,
        prefill_tokens_saved=stats.cached_tokens,
        prefill_tokens_saved_best=best_saved_tokens(rows.rows, page_size),
        wait_s=_waits(trace, result),
        bound_seconds=cost.bound_seconds(rows, output_lens, max_num_seqs) if ran else 0.0,
        failed_requests=len(result.failed),
    )


def write_events(path: Path, result: SimulationResult) -> None:
    """Write a CSV of EVENT_COLUMNS: steps count from 0, `preempted` is how often; -1: never."""
    recorder = result.recorder
    columns = (recorder.admit_step, recorder.first_token_step, recorder.finish_step, recorder.preempted)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(EVENT_COLUMNS)
        writer.writerows((i, *values) for i, values in enumerate(zip(*(c.tolist() for c in columns), strict=True)))


def summary_table(reports: Sequence[tuple[str, PolicyReport]]) -> Table:
    """Policies side by side."""
    table = Table("", *(name for name, _ in reports), title="Simulated")
    columns = [report for _, report in reports]
    table.add_row("steps", *(f"{r.steps:,}" for r in columns))
    table.add_row("seconds", *(f"{r.seconds:,.1f}" for r in columns))
    table.add_row("device hours", *(f"{r.seconds / 3600:,.2f}" for r in columns))
    table.add_row("devices to be done in 1 h", *(f"{int(-(-r.seconds // 3600)):,}" for r in columns))
    table.add_row("output tokens/s", *(f"{r.output_tokens / r.seconds if r.seconds else 0:,.0f}" for r in columns))
    table.add_row("bound / seconds", *(f"{r.bound_seconds / r.seconds if r.seconds else 0:.1%}" for r in columns))
    table.add_row("mean batch", *(f"{r.mean_batch:,.1f}" for r in columns))
    table.add_row("page occupancy", *(f"{r.page_occupancy_mean:.1%}" for r in columns))
    table.add_row("preemptions", *(f"{r.preemptions:,}" for r in columns))
    table.add_row("recomputed tokens", *(f"{r.recomputed_tokens:,}" for r in columns))
    table.add_row("prefill tokens saved", *(_saved(r) for r in columns))
    for tier in Tier:
        if any(tier in r.wait_s for r in columns):
            cells = [r.wait_s.get(tier) for r in columns]
            table.add_row(
                f"wait {tier}, p50 / p99 s", *("" if w is None else f"{w.p50:,.1f} / {w.p99:,.1f}" for w in cells)
            )
    return table


def _saved(report: PolicyReport) -> str:
    best = report.prefill_tokens_saved_best
    return f"{report.prefill_tokens_saved:,} of {best:,} ({report.prefill_tokens_saved / best:.1%})" if best else "-"


def _waits(trace: Trace, result: SimulationResult) -> dict[str, Wait]:
    waits = result.recorder.wait_s(np.array([row.arrival_s for row in trace.rows]))
    found: dict[str, Wait] = {}
    for tier in Tier:
        of_tier: NDArray[np.float64] = waits[[i for i, row in enumerate(trace.rows) if row.tier is tier]]
        of_tier = of_tier[~np.isnan(of_tier)]
        if len(of_tier):
            found[tier.value] = Wait(*(round(float(v), 6) for v in np.percentile(of_tier, (50, 99))))
    return found
