"""What this machine could do at best: measured GEMM rate and read bandwidth, and the bound they put on a workload.

FLOPs = 2·P_body·n + 2·P_head·r + 4·L·H·D·S; bytes = weights per step + KV read once per row (once per group for a
shared prefix). "sum" adds compute time and memory time of the whole job, "overlap" takes the larger of the two.
"""

import heapq
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nightmill_worker.bench.workload import Workload
from nightmill_worker.model.config import DTYPE_BYTES, ModelConfig

_BANDWIDTH_BYTES = 256 << 20
_GEMM_SHAPE = (1024, 576, 1536)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured limits of a machine."""

    flops: float  # bf16 (or fp32) multiply-adds x 2 per second, large GEMM
    bytes_per_s: float  # sequential reads


@dataclass(frozen=True, slots=True)
class Bound:
    """The least seconds a workload can take on a machine with these ceilings."""

    sum_s: float
    overlap_s: float
    steps: int


def measure_ceilings(dtype: torch.dtype, repeats: int = 9) -> Ceilings:
    """Medians over `repeats` of a GEMM and of reading a set larger than the caches."""
    m, k, n = _GEMM_SHAPE
    a, b = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
    gemm_s = _median_seconds(lambda: torch.nn.functional.linear(a, b), repeats * 5)
    big = torch.ones(_BANDWIDTH_BYTES // 4)
    read_s = _median_seconds(lambda: big.sum(), repeats)
    return Ceilings(flops=2 * m * k * n / gemm_s, bytes_per_s=_BANDWIDTH_BYTES / read_s)


def workload_bound(workload: Workload, config: ModelConfig, ceilings: Ceilings, slots: int, dtype: str) -> Bound:
    """Bound for `slots` sequences at once, weights and KV in `dtype`.

    The shared prefix is computed once; its KV is still read once per row, as without shared attention.
    """
    body, head = _parameters(config)
    prefix = workload.rows[0].shared_prefix if workload.rows else 0
    forward, attended, kv_read = prefix, _triangle(0, prefix), 0
    for row in workload.rows:
        prompt, out = len(row.prompt_ids), row.max_tokens
        forward += prompt - prefix + out - 1
        attended += _triangle(prefix, prompt + out - 1)
        kv_read += _triangle(prompt, prompt + out - 1)
    steps = _fewest_steps([row.max_tokens for row in workload.rows], slots)
    flops = 2.0 * body * forward + 2.0 * head * workload.output_tokens
    flops += 4.0 * config.num_layers * config.num_heads * config.head_dim * attended
    num_bytes = float(DTYPE_BYTES[dtype]) * (body + head) * steps + float(config.kv_bytes_per_token(dtype)) * kv_read
    compute_s, memory_s = flops / ceilings.flops, num_bytes / ceilings.bytes_per_s
    return Bound(sum_s=compute_s + memory_s, overlap_s=max(compute_s, memory_s), steps=steps)


def _parameters(config: ModelConfig) -> tuple[int, int]:
    attention = 2 * config.hidden_size * (config.num_heads + config.num_kv_heads) * config.head_dim
    body = config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size)
    return body, config.vocab_size * config.hidden_size


def _triangle(low: int, high: int) -> int:
    """low+1 + … + high."""
    return (high * (high + 1) - low * (low + 1)) // 2


def _fewest_steps(lengths: list[int], slots: int) -> int:
    """Decode steps when each row takes the slot that frees first, longest row first."""
    free_at = [0] * slots
    for length in sorted(lengths, reverse=True):
        heapq.heapreplace(free_at, free_at[0] + length)
    return max(free_at)


def _median_seconds(run: Callable[[], object], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times)
