"""A picture of a simulation: batch and pool over time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nightmill.errors import NightmillError
from nightmill_worker.simulate.simulation import SimulationResult

_COLOURS = {"continuous": "#1b6ca8", "static": "#c0392b"}
_MAX_POINTS = 2000


def pyplot() -> Any:
    """matplotlib.pyplot without a display.

    Raises:
        NightmillError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ModuleNotFoundError as error:
        raise NightmillError("a plot needs matplotlib", hint="pip install 'nightmill[bench]' installs it.") from error
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def write_plot(path: Path, results: Sequence[SimulationResult], title: str) -> None:
    """Draw rows that compute and pages held over simulated time, one colour per policy; the suffix is the format."""
    plt = pyplot()
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(9, 5.5), sharex=True, layout="constrained")
    for result in results:
        recorder = result.recorder
        if not recorder.steps:
            continue
        begins = np.array(recorder.step_start_s)
        colour = _COLOURS.get(result.policy.value)
        label = f"{result.policy.value}: {recorder.steps:,} steps, {recorder.clock_s:,.0f} s"
        top.plot(*_thin(begins, _useful_rows(result)), color=colour, label=label, linewidth=1)
        bottom.plot(*_thin(begins, 100 * np.array(recorder.pages) / result.num_pages), color=colour, linewidth=1)
    top.set_ylabel("rows computing in a step")
    bottom.set_ylabel("pages held, % of the pool")
    bottom.set_xlabel("simulated seconds")
    bottom.set_ylim(0, 101)
    top.set_ylim(bottom=0)
    top.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(results), frameon=False)
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise NightmillError(f"cannot write the plot {path}: {error}") from error
    finally:
        plt.close(figure)


def _useful_rows(result: SimulationResult) -> NDArray[np.float64]:
    """[steps] requests between admission and end: the rest of a static batch is padding."""
    recorder = result.recorder
    done = recorder.finish_step >= 0
    change = np.bincount(recorder.admit_step[done], minlength=recorder.steps + 1).astype(np.float64)
    change -= np.bincount(recorder.finish_step[done] + 1, minlength=recorder.steps + 1)
    return np.cumsum(change)[: recorder.steps]


def _thin(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Means of runs of steps, so that a long run stays a line and not a smear."""
    width = -(-len(x) // _MAX_POINTS)
    starts = np.arange(0, len(x), width)
    counts = np.diff(np.append(starts, len(x)))
    return x[starts], np.add.reduceat(y, starts) / counts
