"""The least time of the GPU workloads, from a device's ceilings: computed, never typed.

A step takes max(weights / BW, linear FLOPs / F) + max(KV bytes / BW, attention FLOPs / F). See simulate/cost_model.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.gpu.section import Ceilings
from bench.gpu.workloads import STEADY_ROWS, Row, steady_rows, w4_rows
from nightmill_worker.simulate.cost_model import MODELS, CostModel, Work
from nightmill_worker.simulate.trace import Trace

SLOTS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadBound:
    """What a workload needs on a model at least."""

    workload: str
    model: str
    output_tokens: int
    num_bytes: float
    flops: float
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second, at best."""
        return self.output_tokens / self.seconds


def bound_seconds(cost: CostModel, rows: Sequence[Row], slots: int = SLOTS) -> float:
    """The least seconds for these rows.

    Rows that all fit at once: every prompt in one step, then decode steps with those not yet at their end. More rows:
    the sums of the whole job in as few steps as full batches need.
    """
    prompts = np.array([len(row.prompt) for row in rows], np.int64)
    outputs = np.array([row.max_tokens for row in rows], np.int64)
    if len(rows) > slots:
        trace = Trace.of_lengths(zip(prompts.tolist(), outputs.tolist(), strict=True))
        return cost.bound_seconds(trace, outputs.tolist(), slots)
    return sum(cost.seconds(work, 1) for work in _steps(prompts, outputs))


def _steps(prompts: "np.ndarray[tuple[int], np.dtype[np.int64]]", outputs: "np.ndarray") -> list[Work]:  # type: ignore[type-arg]
    steps = [Work(int(prompts.sum()), len(prompts), int((prompts * (prompts + 1) // 2).sum()), int(prompts.sum()))]
    for drawn in range(1, int(outputs.max(initial=0))):
        alive = outputs > drawn
        context, count = int((prompts + drawn)[alive].sum()), int(alive.sum())
        steps.append(Work(count, count, context, context))
    return steps


def decode_seconds(cost: CostModel, rows: int, context: int, shared: int = 0) -> float:
    """One decode step; `shared` tokens of every context are read once for all rows."""
    return cost.seconds(Work(rows, rows, rows * context, rows * (context - shared) + shared), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBound:
    """The least times of single steps of a model, ms."""

    model: str
    decode_ms: float  # ROWS rows at CONTEXT tokens
    shared_decode_ms: float  # SHARED of these tokens the same for all rows, read once
    prefill_ms: float  # PREFILL tokens of prompts of CONTEXT tokens, each of which draws
    swap_ms: float  # one row's KV to the host, or back
    recompute_ms: float  # the same row's tokens computed again


ROWS, CONTEXT, SHARED, PREFILL = 256, 1024, 768, 8192


def analytic_steps(ceilings: Ceilings) -> list[StepBound]:
    """Single steps of every model."""
    steps = []
    for shape in MODELS.values():
        cost = CostModel(ceilings.device, shape)
        prompts = PREFILL // CONTEXT
        attended = CONTEXT * (CONTEXT + 1) // 2
        steps.append(
            StepBound(
                model=shape.name,
                decode_ms=1e3 * decode_seconds(cost, ROWS, CONTEXT),
                shared_decode_ms=1e3 * decode_seconds(cost, ROWS, CONTEXT, SHARED),
                prefill_ms=1e3 * cost.seconds(Work(PREFILL, prompts, prompts * attended, PREFILL), 1),
                swap_ms=1e3 * CONTEXT * shape.kv_bytes_per_token / ceilings.device.host_bytes_per_s,
                recompute_ms=1e3 * cost.seconds(Work(CONTEXT, 1, attended, CONTEXT), 1),
            )
        )
    return steps


def analytic_table(ceilings: Ceilings) -> list[WorkloadBound]:
    """Every workload on every model."""
    workloads = {
        "W4 (256 rows, 100-1,024 in and out)": w4_rows(),
        f"W5 ({STEADY_ROWS:,} rows, 1,000 in and out)": steady_rows(STEADY_ROWS),
    }
    return [
        _bound(name, rows, CostModel(ceilings.device, shape), shape.name)
        for name, rows in workloads.items()
        for shape in MODELS.values()
    ]


def _bound(name: str, rows: Sequence[Row], cost: CostModel, model: str) -> WorkloadBound:
    prompts = np.array([len(row.prompt) for row in rows], np.int64)
    outputs = np.array([row.max_tokens for row in rows], np.int64)
    last = prompts + outputs - 1  # the last token drawn is never computed
    shape = cost.model
    tokens, drawn = int(last.sum()), int(outputs.sum())
    attended = int((last * (last + 1) // 2).sum())
    read = attended - int((prompts * (prompts - 1) // 2).sum())
    num_steps = int(outputs.max()) if len(rows) <= SLOTS else -(-drawn // SLOTS)
    return WorkloadBound(
        workload=name,
        model=model,
        output_tokens=drawn,
        num_bytes=float(shape.step_weight_bytes) * num_steps + float(shape.kv_bytes_per_token) * (read + tokens),
        flops=2.0 * shape.body_parameters * tokens
        + 2.0 * shape.head_parameters * drawn
        + 4.0 * shape.layers * shape.heads * shape.head_dim * attended,
        seconds=bound_seconds(cost, rows),
    )
