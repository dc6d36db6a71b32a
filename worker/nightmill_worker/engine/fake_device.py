"""The fake model on a fake device: it runs behind the caller's back, as late as it may, in the order of the calls."""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from nightmill.errors import EngineError
from nightmill_worker.engine.fake import FakeRunner, FakeRunnerConfig
from nightmill_worker.engine.step import StepOutput, StepPlan

_MAX_IN_FLIGHT = 2
_EAGERNESS = (0.0, 0.0, 0.3, 1.0)

Record = TypeVar("Record")


class FakeDevice(FakeRunner):
    """A FakeRunner that is RunsAhead. What is submitted is done at a random moment, `collect` at the latest.

    So a page that is given to somebody else too early holds something else when the step looks, or is overwritten by
    it. Moments are those at which it is called, drawn from `config.device_seed`: no clock and no thread.
    """

    def __init__(self, config: FakeRunnerConfig) -> None:
        super().__init__(config)
        self._random = random.Random(config.device_seed)
        self._eagerness = self._random.choice(_EAGERNESS)
        self._queue: deque[Callable[[], None]] = deque()  # what has not been done yet
        self._outputs: deque[StepOutput] = deque()  # of steps that have been done
        self._num_in_flight = 0
        self._drawn: NDArray[np.int32] = np.empty(0, np.int32)  # by the step done last

    def submit(self, plan: StepPlan) -> None:
        """See RunsAhead."""
        self._check_open()
        if self._num_in_flight == _MAX_IN_FLIGHT:
            raise RuntimeError(f"{_MAX_IN_FLIGHT} steps are in flight: collect one first")
        self._num_in_flight += 1
        kept = _copied(replace(plan, sample=_copied(plan.sample)))
        self._queue.append(lambda: self._do(kept))
        self._maybe_work()

    def collect(self) -> StepOutput:
        """See RunsAhead."""
        self._check_open()
        if not self._num_in_flight:
            raise RuntimeError("no step is in flight")
        while not self._outputs:
            self._queue.popleft()()
        self._maybe_work()
        self._num_in_flight -= 1
        return self._outputs.popleft()

    def run(self, plan: StepPlan) -> StepOutput:
        """See Runner."""
        if self._num_in_flight:
            raise RuntimeError("run with a step in flight: collect it first")
        self.submit(plan)
        return self.collect()

    def swap_out(self, pages: NDArray[np.int32], host_pages: NDArray[np.int32]) -> None:
        """See Swaps."""
        while self._queue:  # the pages may be given away when this returns
            self._queue.popleft()()
        super().swap_out(pages, host_pages)

    def swap_in(self, host_pages: NDArray[np.int32], pages: NDArray[np.int32]) -> None:
        """See Swaps."""
        self._check_copy(pages, host_pages)
        host_pages, pages = host_pages.copy(), pages.copy()
        self._queue.append(lambda: FakeRunner.swap_in(self, host_pages, pages))
        self._maybe_work()

    def poison_host(self, host_pages: NDArray[np.int32]) -> None:
        """Fill host pages with garbage, after the copies that were asked for before."""
        host_pages = host_pages.copy()
        self._queue.append(lambda: FakeRunner.poison_host(self, host_pages))

    def _do(self, plan: StepPlan) -> None:
        if plan.token_source is not None:
            is_named = plan.token_source >= 0
            if (plan.token_source >= len(self._drawn)).any():
                raise EngineError(f"step {plan.step} names draws that the step before has not made")
            token_ids = plan.token_ids.copy()
            token_ids[is_named] = self._drawn[plan.token_source[is_named]]
            plan = replace(plan, token_ids=token_ids)
        output = FakeRunner.run(self, plan)
        self._drawn = output.tokens.copy()
        self._outputs.append(output)

    def _maybe_work(self) -> None:
        while self._queue and self._random.random() < self._eagerness:
            self._queue.popleft()()


def _copied(record: Record) -> Record:
    """A record whose arrays are its own."""
    values: dict[str, Any] = {field.name: getattr(record, field.name) for field in fields(record)}  # type: ignore[arg-type]
    own = {name: value.copy() for name, value in values.items() if isinstance(value, np.ndarray)}
    return replace(record, **own)  # type: ignore[type-var]
