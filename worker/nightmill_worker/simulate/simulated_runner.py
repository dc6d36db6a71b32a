"""A Runner that computes nothing: it knows how long every answer is, and what the step would have cost."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from nightmill_worker.engine.step import HostShape, PoolShape, StepOutput, StepPlan
from nightmill_worker.simulate.cost_model import CostModel

EOS_TOKEN = 0
_TOKEN = 1


class SimulatedRunner:
    """Draws EOS when an answer has its length; a request is known by its seed, which is its row in the trace.

    Args:
        cost: Prices the steps.
        pool: The page pool it pretends to have.
        host: The host pool, and how fast copies to it are. They take their time before the next step: no overlap.
        vocab_size: Token ids below it are valid.
        prompt_lens: [N] by trace row.
        output_lens: [N] by trace row; never reached where max_tokens or ignore_eos end the answer.
        observe: Called in each step with the plan and its seconds, while the scheduler holds the step's pages.
    """

    def __init__(
        self,
        cost: CostModel,
        pool: PoolShape,
        host: HostShape,
        vocab_size: int,
        prompt_lens: NDArray[np.int64],
        output_lens: NDArray[np.int64],
        observe: Callable[[StepPlan, float], None],
    ) -> None:
        self._cost = cost
        self._pool = pool
        self._host = host
        self._copy_s = 0.0  # of copies since the last step
        self._vocab_size = vocab_size
        self._end = prompt_lens + output_lens - 1  # position of the last token
        self._observe = observe

    @property
    def pool(self) -> PoolShape:
        """See Runner."""
        return self._pool

    @property
    def host(self) -> HostShape:
        """See Swaps."""
        return self._host

    @property
    def vocab_size(self) -> int:
        """See Runner."""
        return self._vocab_size

    def run(self, plan: StepPlan) -> StepOutput:
        """See Runner."""
        seconds = self._cost.step_seconds(plan)
        self._observe(plan, self._copy_s + seconds)
        self._copy_s = 0.0
        batch = plan.sample
        is_last = batch.position >= self._end[batch.seed.astype(np.int64)]
        return StepOutput(tokens=np.where(is_last, EOS_TOKEN, _TOKEN).astype(np.int32), seconds=seconds)

    def swap_out(self, pages: NDArray[np.int32], host_pages: NDArray[np.int32]) -> None:
        """See Swaps."""
        self._copy(len(pages))

    def swap_in(self, host_pages: NDArray[np.int32], pages: NDArray[np.int32]) -> None:
        """See Swaps."""
        self._copy(len(pages))

    def _copy(self, num_pages: int) -> None:
        page_bytes = self._pool.page_size * self._pool.bytes_per_token
        self._copy_s += num_pages * page_bytes / self._host.bytes_per_s

    def close(self) -> None:
        """See Runner."""
