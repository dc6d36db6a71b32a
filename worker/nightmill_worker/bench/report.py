"""A comparison as a table for people and as JSON for files."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich import box
from rich.table import Table

from nightmill_worker.bench.comparison import Cell
from nightmill_worker.bench.machine import Machine
from nightmill_worker.bench.measurement import Measurement
from nightmill_worker.bench.roofline import Bound
from nightmill_worker.bench.workload import Workload
from nightmill_worker.engine.roofline import Ceilings


def comparison_table(cells: Sequence[Cell]) -> Table:
    """Generated tokens per second of each engine, and how many times the first one is ahead of it.

    bound: of the whole job's least time, however it is scheduled; roof: of the least time of the steps it took.

    Fits 80 columns.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("workload", no_wrap=True)
    table.add_column("engine", no_wrap=True)
    for name in ("tok/s", "range", "s", "steps", "batch", "bound", "roof", "ahead"):
        table.add_column(name, justify="right", no_wrap=True)
    leaders: dict[str, Cell] = {}
    for cell in cells:
        leader = leaders.setdefault(cell.workload, cell)
        table.add_row(
            cell.workload,
            cell.engine,
            f"{cell.output_tokens_per_s:.{1 if cell.output_tokens_per_s < 1000 else 0}f}",
            f"{cell.lowest_tokens_per_s:.0f}–{cell.highest_tokens_per_s:.0f}",
            f"{cell.seconds:.{1 if cell.seconds < 100 else 0}f}",
            str(cell.detail.get("steps", "")),
            f"{cell.detail['mean_batch']:.1f}" if "mean_batch" in cell.detail else "",
            _percent(cell.bound_share),
            _percent(cell.detail.get("roofline_share")),
            "" if cell is leader else f"{leader.output_tokens_per_s / cell.output_tokens_per_s:.2f}×",
            style="red" if cell.rows_wrong_length else None,
        )
    return table


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f}%"


def comparison_json(
    cells: Sequence[Cell],
    measurements: Sequence[Measurement],
    workloads: Sequence[Workload],
    bounds: dict[str, Bound],
    ceilings: Ceilings,
    machine: Machine,
    settings: dict[str, object],
) -> str:
    """Everything needed to judge or repeat the comparison, as one JSON object."""
    return json.dumps(
        {
            "machine": asdict(machine),
            "settings": settings,
            "ceilings": asdict(ceilings),
            "workloads": {
                w.name: {
                    "sha256": w.sha256,
                    "is_reference": w.is_reference,
                    "rows": len(w.rows),
                    "prompt_tokens": w.prompt_tokens,
                    "output_tokens": w.output_tokens,
                    "bound": asdict(bounds[w.name]),
                }
                for w in workloads
            },
            "results": [asdict(cell) for cell in cells],
            "runs": [asdict(m) for m in measurements],
        },
        indent=1,
    )
