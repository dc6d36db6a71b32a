"""The least seconds that each part of a step could take on this machine: its bytes and FLOPs over measured ceilings."""

from collections.abc import Callable
from typing import Any

from bench.part_timer import Part, Seconds
from nightmill_worker.engine.roofline import Ceilings, ModelCost, Roofline, step_work
from nightmill_worker.engine.step import StepOutput, StepPlan
from nightmill_worker.model.config import ModelConfig


class PartBounds:
    """Sums bounds over the steps that a runner is given."""

    def __init__(self, roofline: Roofline, config: ModelConfig, page_size: int) -> None:
        self._cost, self._ceilings = roofline.cost, roofline.ceilings
        self._head_bytes = _head_bytes(self._cost, config)
        self._page_size = page_size
        self.seconds: Seconds = dict.fromkeys((Part.LINEARS, Part.HEAD, Part.ATTENTION), 0.0)

    def watch(self, runner: Any) -> None:
        """Add up each step that the runner runs from now on."""
        run: Callable[[StepPlan], StepOutput] = runner.run

        def watched(plan: StepPlan) -> StepOutput:
            self._add(plan)
            return run(plan)

        runner.run = watched

    def read(self) -> Seconds:
        """So far."""
        return dict(self.seconds)

    @property
    def ceilings(self) -> Ceilings:
        """What they are measured against."""
        return self._ceilings

    def _add(self, plan: StepPlan) -> None:
        cost, flops, rate = self._cost, self._ceilings.flops, self._ceilings.bytes_per_s
        work = step_work(plan, cost.windows, self._page_size)
        body_bytes = cost.weight_bytes - self._head_bytes
        self.seconds[Part.LINEARS] += max(body_bytes / rate, cost.token_flops * work.tokens / flops)
        if work.logit_rows:
            self.seconds[Part.HEAD] += max(self._head_bytes / rate, cost.logit_flops * work.logit_rows / flops)
        attention_flops = cost.attention_flops * work.attended
        self.seconds[Part.ATTENTION] += max(cost.cache_bytes(work) / rate, attention_flops / flops)


def _head_bytes(cost: ModelCost, config: ModelConfig) -> float:
    """A weight is as many bytes in the head as anywhere."""
    weights = cost.token_flops / 2 + cost.logit_flops / 2
    return cost.weight_bytes * config.vocab_size * config.hidden_size / weights
