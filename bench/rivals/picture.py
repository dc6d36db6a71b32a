"""The comparison as bars, one panel for each workload."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.rivals.lineup import OURS
from bench.rivals.standing import Cell

_OURS_COLOUR, _RIVAL_COLOUR, _VOID_COLOUR = "#1b6ca8", "#9aa5b1", "#e3e6ea"
_BOUND_COLOUR = "#c0392b"


def draw(path: Path, cells: Sequence[Cell]) -> bool:
    """Write an SVG: medians as bars, ranges as whiskers. False when there is nothing to draw, or no matplotlib."""
    workloads = list(dict.fromkeys(cell.workload for cell in cells))
    if not workloads or importlib.util.find_spec("matplotlib") is None:
        return False
    import matplotlib

    matplotlib.use("Agg")
    # The same figures give the same file.
    matplotlib.rcParams["svg.hashsalt"] = "nightmill"
    import matplotlib.pyplot as plt

    rivals = list(dict.fromkeys(cell.rival for cell in cells))
    size = (3.1 * len(workloads) + 1.2, 0.42 * len(rivals) + 1.1)
    figure, panels = plt.subplots(1, len(workloads), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for axes, workload in zip(panels[0], workloads, strict=True):
        here = {cell.rival: cell for cell in cells if cell.workload == workload}
        for place, rival in enumerate(rivals):
            if rival in here:
                _bar(axes, place, here[rival])
        axes.set_title(workload, fontsize=10)
        bound = _bound(list(here.values()))
        if bound is not None:
            axes.axvline(bound, color=_BOUND_COLOUR, linestyle=":", linewidth=1.2)
        axes.set_xlim(0, 1.25 * max(bound or 0.0, *(cell.highest for cell in here.values())))
        axes.tick_params(labelsize=8)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    panels[0][0].set_yticks(range(len(rivals)), rivals, fontsize=9)
    panels[0][0].invert_yaxis()
    figure.supxlabel(
        "generated tokens/s: median, range (pale: first rows only, or void; dotted: the bound)", fontsize=8
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)
    plt.close(figure)
    return True


def _bound(cells: Sequence[Cell]) -> float | None:
    """Tokens/s at 100 % of the bound."""
    return next((cell.tokens_per_s / cell.bound_share for cell in cells if cell.bound_share), None)


def _bar(axes: Any, place: int, cell: Cell) -> None:
    is_sound = cell.is_valid and cell.is_whole
    colour = (_OURS_COLOUR if cell.rival == OURS else _RIVAL_COLOUR) if is_sound else _VOID_COLOUR
    below, above = cell.tokens_per_s - cell.lowest, cell.highest - cell.tokens_per_s
    axes.barh(place, cell.tokens_per_s, color=colour, height=0.7, xerr=[[below], [above]], ecolor="#444444", capsize=2)
    axes.annotate(
        f"{cell.tokens_per_s:.0f}",
        (cell.highest, place),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
    )
