"""Attention of one layer on this CPU: ms, GFLOP/s and GB/s of each case against what the machine can do at best.

    python -m bench.attention [--threads N] [--dtype bfloat16|float32] [--repeat N] [--isa NAME]... [--reference]

Cases (`attention_cases.py`): decodes, 64 at contexts near 500: `unique`, every sequence has pages of its own; `shared`,
the first 384 tokens are one set of pages; `grouped`, the same, and the call is told so. Prefills of 512 tokens behind
0, 512 and 1,536 others. The mixed steps of the runs W1 and W3, and their prefills and decodes apart.

Each figure is the best of `repeat` rounds, all ways in turn in each round, so that a busy machine hurts them alike:
compare ratios, not absolutes. With one thread the clock is the thread's CPU time, which other processes disturb much
less. The bound is the larger of the visible scores' and sums' FLOPs at the rate of torch's matmul, and K and V at the
rate of torch.sum, both measured in this run. `--reference` times the plain torch path too, which is slow.
"""

import argparse
import sys
import time
from collections.abc import Callable

import torch

from bench.attention_cases import (
    LAYERS,
    SCALE,
    Case,
    decode_case,
    grouped,
    prefill_case,
    w1_case,
    w1_parts,
    w3_case,
    w3_parts,
)
from nightmill_kernels.backend import active_isa, use_isa
from nightmill_kernels.cpu.huge_pages import zeroed_on_touch
from nightmill_kernels.cpu.isa import available_isas
from nightmill_kernels.paged_attention import paged_attention


def attend(case: Case, isa: str) -> Callable[[], None]:
    """The case's call for each of its layers."""

    def run() -> None:
        with use_isa(isa):
            for k_pool, v_pool in case.pools:
                paged_attention(case.q, k_pool, v_pool, case.meta, scale=SCALE)

    return run


def best_seconds(ways: dict[str, Callable[[], None]], repeat: int) -> dict[str, float]:
    """Seconds of each way, the best round."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best = dict.fromkeys(ways, float("inf"))
    for way in ways.values():
        way()
    for _ in range(repeat):
        for name, way in ways.items():
            start = clock()
            way()
            best[name] = min(best[name], clock() - start)
    return best


def ceilings(dtype: torch.dtype) -> tuple[float, float]:
    """FLOP/s of a product of a size at which torch is at its best, and bytes/s of a sum of what no cache holds."""
    size = 1024
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    many = zeroed_on_touch((64 << 20,), torch.float32)
    many.fill_(1.0)
    ways: dict[str, Callable[[], None]] = {"mm": lambda: _do(torch.mm(a, b)), "sum": lambda: _do(many.sum())}
    best = best_seconds(ways, 10)
    return 2 * size**3 / best["mm"], many.nbytes / best["sum"]


def _do(_: torch.Tensor) -> None:
    """For its cost alone."""


def cases(dtype: torch.dtype) -> dict[str, Case]:
    """Every case by its name."""
    shared = decode_case(True, dtype)
    w1_prefill, w1_decode = w1_parts(dtype)
    w3_prefill, w3_decode = w3_parts(dtype)
    return {
        "decode unique": decode_case(False, dtype),
        "decode shared": shared,
        "decode grouped": grouped(shared),
        "prefill 512": prefill_case(dtype, 0),
        "prefill 512 after 512": prefill_case(dtype, 512),
        "prefill 512 after 1536": prefill_case(dtype, 1536),
        "W1": w1_case(dtype),
        "W1 prefill": w1_prefill,
        "W1 decode": w1_decode,
        "W3": w3_case(dtype),
        "W3 prefill": w3_prefill,
        "W3 decode": w3_decode,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--isa", action="append", help="instruction sets to time (default: the best one)")
    parser.add_argument("--reference", action="store_true", help="time plain torch too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    isas = options.isa or [active_isa()]
    for isa in isas:
        if isa not in (*available_isas(), "reference"):
            sys.exit(f"this machine cannot run {isa}: it has {', '.join(available_isas())}")
    isas += ["reference"] if options.reference else []
    flops, rate = ceilings(dtype)
    print(
        f"{options.threads} threads, {options.dtype}, best of {options.repeat}: "
        f"torch's matmul {flops / 1e9:.0f} GFLOP/s, torch.sum {rate / 1e9:.1f} GB/s"
    )
    for name, case in cases(dtype).items():
        bound = max(case.flops / flops, case.num_bytes / rate)
        for isa, seconds in best_seconds({isa: attend(case, isa) for isa in isas}, options.repeat).items():
            layer = seconds / LAYERS
            print(
                f"{name:22s} {isa:12s} {layer * 1e3:8.3f} ms/layer {case.flops / layer / 1e9:6.0f} GFLOP/s "
                f"{case.num_bytes / layer / 1e9:6.1f} GB/s   {layer / bound:5.2f}x the bound of {bound * 1e3:.3f} ms"
            )


if __name__ == "__main__":
    main()
