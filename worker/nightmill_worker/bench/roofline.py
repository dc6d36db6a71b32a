"""The bound that a machine's measured ceilings put on a workload.

"sum" adds compute time and memory time of the whole job, "overlap" takes the larger of the two; amounts are those of
engine/roofline.py.
"""

import heapq
from dataclasses import dataclass

from nightmill_worker.bench.workload import Workload
from nightmill_worker.engine.roofline import Ceilings, Work
from nightmill_worker.model.config import ModelConfig
from nightmill_worker.model.roofline import model_cost


@dataclass(frozen=True, slots=True)
class Bound:
    """The least seconds a workload can take on a machine with these ceilings."""

    sum_s: float
    overlap_s: float
    steps: int


def workload_bound(
    workload: Workload,
    config: ModelConfig,
    ceilings: Ceilings,
    slots: int,
    dtype: str,
    quantization: str | None = None,
) -> Bound:
    """Bound for `slots` sequences at once, weights and KV in `dtype`, the layers' weights quantised or not.

    The shared prefix is computed once; its KV is still read once per row, as without shared attention.
    """
    prefix = workload.rows[0].shared_prefix if workload.rows else 0
    forward, attended, kv_read = prefix, _triangle(0, prefix), 0
    for row in workload.rows:
        prompt, out = len(row.prompt_ids), row.max_tokens
        forward += prompt - prefix + out - 1
        attended += _triangle(prefix, prompt + out - 1)
        kv_read += _triangle(prompt, prompt + out - 1)
    steps = _fewest_steps([row.max_tokens for row in workload.rows], slots)
    cost, work = model_cost(config, dtype, quantization), Work(forward, workload.output_tokens, attended, kv_read)
    flops, num_bytes = cost.all_flops(work), cost.all_bytes(work, steps)
    compute_s, memory_s = flops / ceilings.flops, num_bytes / ceilings.bytes_per_s
    return Bound(sum_s=compute_s + memory_s, overlap_s=max(compute_s, memory_s), steps=steps)


def _triangle(low: int, high: int) -> int:
    """low+1 + … + high."""
    return (high * (high + 1) - low * (low + 1)) // 2


def _fewest_steps(lengths: list[int], slots: int) -> int:
    """Decode steps when each row takes the slot that frees first, longest row first."""
    free_at = [0] * slots
    for length in sorted(lengths, reverse=True):
        heapq.heapreplace(free_at, free_at[0] + length)
    return max(free_at)
