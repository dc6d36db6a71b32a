"""What a simulated run was like: when each request moved, and how full batch and pool were in each step."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
_NEVER = -1


@dataclass(slots=True)
class Recorder:
    """Filled step by step. Steps count from 0; a request is its row in the trace."""

    num_requests: int
    clock_s: float = 0.0
    step_start_s: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)  # rows of the batch, padding included
    pages: list[int] = field(default_factory=list)  # held during the step
    admit_step: Ints = field(init=False)
    first_token_step: Ints = field(init=False)
    finish_step: Ints = field(init=False)
    preempted: Ints = field(init=False)  # how often

    def __post_init__(self) -> None:
        self.admit_step = np.full(self.num_requests, _NEVER, np.int64)
        self.first_token_step = np.full(self.num_requests, _NEVER, np.int64)
        self.finish_step = np.full(self.num_requests, _NEVER, np.int64)
        self.preempted = np.zeros(self.num_requests, np.int64)

    @property
    def steps(self) -> int:
        """Steps so far."""
        return len(self.step_start_s)

    def step(self, seconds: float, rows: int, pages: int) -> None:
        """A step begins now and will take so long."""
        self.step_start_s.append(self.clock_s)
        self.rows.append(rows)
        self.pages.append(pages)
        self.clock_s += seconds

    def drew(self, requests: Ints) -> None:
        """The current step, the last one begun, draws a token for each of these."""
        fresh = requests[self.first_token_step[requests] == _NEVER]
        self.first_token_step[fresh] = self.steps - 1

    def running(self, requests: Ints) -> Ints:
        """These were in the batch's table in the last step; returns those that were not there before."""
        fresh: Ints = requests[self.admit_step[requests] == _NEVER]
        self.admit_step[fresh] = self.steps - 1
        return fresh

    def finished(self, request: int, num_preemptions: int) -> None:
        """The last step ended it."""
        self.finish_step[request] = self.steps - 1
        self.preempted[request] = num_preemptions

    def wait_s(self, arrivals: NDArray[np.float64]) -> NDArray[np.float64]:
        """[N] seconds from arrival to the begin of the step that admitted it; NaN for those never admitted."""
        begins = np.array([*self.step_start_s, np.nan])
        waits: NDArray[np.float64] = begins[self.admit_step] - arrivals  # _NEVER picks the NaN
        return waits
