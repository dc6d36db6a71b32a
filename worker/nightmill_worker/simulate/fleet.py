"""How many devices a trace needs to be done in time."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from nightmill_worker.engine.options import Policy
from nightmill_worker.simulate.simulation import Simulation, SimulationOptions
from nightmill_worker.simulate.trace import Trace

_MAX_TRIES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSize:
    """An answer: so many devices, each with a contiguous part of the file."""

    devices: int
    seconds: float  # of the slowest part
    is_enough: bool  # False: not even this many; the longest answers decide, not the devices


def devices_within(
    trace: Trace,
    options: SimulationOptions,
    within_s: float,
    alone_s: float,
    progress: Callable[[int], None] | None = None,
) -> FleetSize:
    """The least number of devices that run the trace's parts in `within_s`, found in a few tries.

    Parts are contiguous, batching is continuous. The first guess divides what one device takes (`alone_s`); it is too
    low by the tail of each part, so each guess is simulated whole. Rows that arrive late are taken as they are: a part
    may have to wait for them.

    Args:
        trace: All rows.
        options: Of each device.
        within_s: Seconds from the start, model loading not included.
        alone_s: Seconds on one device.
        progress: Told the number of devices of each guess.
    """
    devices = max(1, min(len(trace), math.ceil(alone_s / within_s)))
    slowest = alone_s
    for _ in range(_MAX_TRIES):
        if progress is not None:
            progress(devices)
        slowest = alone_s if devices == 1 else _slowest_part(trace, options, devices)
        if slowest <= within_s:
            return FleetSize(devices=devices, seconds=slowest, is_enough=True)
        if devices == len(trace):
            break
        devices = min(len(trace), max(devices + 1, math.ceil(devices * slowest / within_s)))
    return FleetSize(devices=devices, seconds=slowest, is_enough=False)


def _slowest_part(trace: Trace, options: SimulationOptions, devices: int) -> float:
    bounds = [len(trace) * i // devices for i in range(devices + 1)]
    parts = (Trace(trace.rows[low:high]) for low, high in pairwise(bounds))
    return max(Simulation(part, options, Policy.CONTINUOUS).run().recorder.clock_s for part in parts)
