"""Attention of one layer on this CPU: decode ms per layer against the reference, prefill GFLOP/s against a matmul.

    python bench/attention.py [--threads N] [--dtype bfloat16|float32] [--repeat N] [--isa NAME]...

The shape is SmolLM2-135M's (9 query heads, 3 KV heads, head size 64), batch 64, contexts near 500, page size 16.
`unique`: every sequence has pages of its own; `shared`: the first 384 tokens are one set of pages; `grouped`: the same,
and the call is told so (shared-prefix attention), in the same rounds as without. Each figure is the
best of `repeat` rounds, all ways in turn in each round, so that a busy machine hurts them alike: compare ratios, not
absolutes. With one thread the clock is the thread's CPU time, which other processes disturb much less. Calls go
through several pools in turn, so that no pool stays in a cache from one call to the next.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from nightmill_kernels.backend import active_isa, use_isa
from nightmill_kernels.cpu.huge_pages import zeroed_on_touch
from nightmill_kernels.cpu.isa import available_isas
from nightmill_kernels.paged_attention import AttentionMetadata, PrefixGroups, paged_attention

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 9, 3, 64, 16
BATCH, SHARED_TOKENS, CHUNK, LAYERS = 64, 384, 512, 8
SCALE = HEAD_DIM**-0.5
Way = TypeVar("Way", str, tuple[str, str])


@dataclass(frozen=True, slots=True)
class Case:
    """Inputs of one call for each of LAYERS layers."""

    q: Tensor
    pools: list[tuple[Tensor, Tensor]]
    meta: AttentionMetadata
    flops: int  # multiply-adds of the visible scores and sums, twice


def decode_case(shared: bool, dtype: torch.dtype) -> Case:
    contexts = torch.randint(450, 551, (BATCH,), dtype=torch.int32)
    common = SHARED_TOKENS // PAGE_SIZE if shared else 0
    width = -(-int(contexts.max()) // PAGE_SIZE)
    own = width - common
    tables = torch.empty(BATCH, width, dtype=torch.int32)
    tables[:, :common] = torch.arange(1, common + 1, dtype=torch.int32)
    tables[:, common:] = (torch.randperm(BATCH * own) + common + 1).view(BATCH, own)
    starts = torch.arange(BATCH + 1, dtype=torch.int32)
    return _case(starts, contexts, tables, common + BATCH * own + 1, 1, dtype)


def grouped(case: Case) -> Case:
    """The `shared` case, told which pages are the same."""
    groups = PrefixGroups(
        starts=torch.tensor([0, BATCH], dtype=torch.int32),
        sequences=torch.arange(BATCH, dtype=torch.int32),
        num_pages=torch.tensor([SHARED_TOKENS // PAGE_SIZE], dtype=torch.int32),
    )
    return replace(case, meta=replace(case.meta, groups=groups))


def prefill_case(dtype: torch.dtype, past: int) -> Case:
    context = past + CHUNK
    tables = (torch.randperm(context // PAGE_SIZE) + 1).int().view(1, -1)
    starts, contexts = torch.tensor([0, CHUNK], dtype=torch.int32), torch.tensor([context], dtype=torch.int32)
    return _case(starts, contexts, tables, tables.numel() + 1, CHUNK, dtype)


def _case(starts: Tensor, contexts: Tensor, tables: Tensor, pages: int, longest: int, dtype: torch.dtype) -> Case:
    shape = (pages, KV_HEADS, PAGE_SIZE, HEAD_DIM)
    pages = zeroed_on_touch((LAYERS, 2, *shape), dtype)  # in huge pages where there are any, as the engine's pool
    for layer in pages.flatten(0, 1):
        layer.copy_(torch.randn(shape))
    pools = [(layer[0], layer[1]) for layer in pages]
    meta = AttentionMetadata(query_starts=starts, context_lens=contexts, page_tables=tables, max_query_len=longest)
    lengths = (starts[1:] - starts[:-1]).long()
    visible = int((lengths * contexts - lengths * (lengths - 1) // 2).sum())
    return Case(torch.randn(int(starts[-1]), HEADS, HEAD_DIM).to(dtype), pools, meta, 4 * visible * HEADS * HEAD_DIM)


def attend(case: Case, isa: str) -> Callable[[], None]:
    def run() -> None:
        with use_isa(isa):
            for k_pool, v_pool in case.pools:
                paged_attention(case.q, k_pool, v_pool, case.meta, scale=SCALE)

    return run


def matmul(dtype: torch.dtype) -> tuple[Callable[[], None], int]:
    """LAYERS products of a size at which torch is at its best, and the flops of one."""
    size = 1024
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)

    def run() -> None:
        for _ in range(LAYERS):
            torch.mm(a, b)

    return run, 2 * size**3


def best_seconds(ways: dict[Way, Callable[[], None]], repeat: int) -> dict[Way, float]:
    """Seconds per layer, the best round of each way."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best = dict.fromkeys(ways, float("inf"))
    for way in ways.values():
        way()
    for _ in range(repeat):
        for name, way in ways.items():
            start = clock()
            way()
            best[name] = min(best[name], (clock() - start) / LAYERS)
    return best


def compare_decodes(isas: list[str], dtype: torch.dtype, repeat: int) -> None:
    unique, shared = decode_case(False, dtype), decode_case(True, dtype)
    for cases in ({"unique": unique}, {"shared": shared, "grouped": grouped(shared)}):
        ways = {(name, isa): attend(case, isa) for isa in (*isas, "reference") for name, case in cases.items()}
        times = best_seconds(ways, repeat)
        for (name, isa), seconds in times.items():
            ratio = times[name, "reference"] / seconds
            line = f"decode {name:7s} {isa:12s} {seconds * 1e3:8.3f} ms/layer   {ratio:5.1f}x the reference's speed"
            gain = f"   {times['shared', isa] / seconds:5.2f}x without groups" if name == "grouped" else ""
            print(line + gain)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--isa", action="append", help="instruction sets to time (default: the best one)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    isas = options.isa or [active_isa()]
    for isa in isas:
        if isa not in (*available_isas(), "reference"):
            sys.exit(f"this machine cannot run {isa}: it has {', '.join(available_isas())}")
    print(f"{options.threads} threads, {options.dtype}, best of {options.repeat}, {' '.join(isas)}")
    compare_decodes(isas, dtype, options.repeat)
    product, flops = matmul(dtype)
    for past in (0, 1536):
        case = prefill_case(dtype, past)
        ways = {isa: attend(case, isa) for isa in (*isas, "reference")} | {"torch matmul": product}
        times = best_seconds(ways, options.repeat)
        gemm = flops / times["torch matmul"]
        for way, seconds in times.items():
            rate = (flops if way == "torch matmul" else case.flops) / seconds
            label = f"prefill {CHUNK} after {past}"
            print(f"{label:22s} {way:12s} {rate / 1e9:8.1f} GFLOP/s   {rate / gemm:5.2f} of torch's matmul")


if __name__ == "__main__":
    main()
