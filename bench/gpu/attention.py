"""Attention on a GPU: decodes against copy bandwidth, prefills in TFLOP/s, shared prefixes against the same without.

    python -m bench.gpu.attention [--tiny] [--sweep]

One layer of Qwen3-0.6B or Llama-3.1-8B in bf16, merge included, in a graph of several. Bytes are K and V of every
visible token once (of a shared prefix that is told, once for all rows), q and the output; what the kernel reads again,
and its partials, are not counted. `graph` grids are the persistent ones that captured decode steps use, `exact` ones
those of other steps. A few rows of every case are compared with the reference. --sweep: other launch configurations
and chunks for the first case of each model. --tiny: small shapes in Triton's interpreter, which shows that the script
works and measures nothing.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

if "--tiny" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import numpy as np
import torch
from torch import Tensor

from bench.gpu.clock import host_seconds_per_call, seconds_in_graph
from bench.gpu.pointwise import copy_bytes_per_s
from nightmill_kernels import work_list
from nightmill_kernels.backend import use_isa, use_triton
from nightmill_kernels.cpu.isa import REFERENCE
from nightmill_kernels.metadata import AttentionMetadata, AttentionWork
from nightmill_kernels.paged_attention import paged_attention
from nightmill_kernels.work_list import device_work, plan_attention

LAUNCHES = 8  # of a graph
CHECKED = 2  # sequences compared with the reference
TOLERANCE = 0.02
"""Of means of N(0, 1) values in bf16: a rounding of 2^-8 each of the weights and the result, and slack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """What of a model attention sees."""

    model: str
    heads: int
    kv_heads: int
    head_dim: int


QWEN3 = Heads(model="Qwen3-0.6B", heads=16, kv_heads=8, head_dim=128)
LLAMA = Heads(model="Llama-3.1-8B", heads=32, kv_heads=8, head_dim=128)
SMALL = Heads(model="tiny", heads=4, kv_heads=2, head_dim=16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A step of `rows` sequences alike; contexts[0] to contexts[1] tokens each."""

    name: str
    of: Heads
    rows: int
    contexts: tuple[int, int]
    query_len: int = 1
    shared: int = 0  # tokens that all rows have in common
    is_told: bool = False  # whether the step says so
    page_size: int = 16
    is_graph: bool = True  # the grid of a captured step


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One case."""

    name: str
    model: str
    rows: int
    page_size: int
    grid: str
    seconds: float
    host_seconds: float
    bytes_per_s: float
    flops_per_s: float
    is_right: bool  # where compared with the reference


def cases(heads: Sequence[Heads]) -> tuple[Case, ...]:
    """What is measured of each model; the first is the one that has a target."""
    chosen = []
    for of in heads:
        one = Case(name="decode 1k", of=of, rows=256, contexts=(1024, 1024))
        chosen += [
            one,
            replace(one, page_size=64),
            replace(one, is_graph=False),
            replace(one, name="decode 100-2k", contexts=(100, 2048)),
            replace(one, name="decode 8k", rows=16, contexts=(8192, 8192)),
            replace(one, name="2k shared + 128", contexts=(2176, 2176), shared=2048),
            replace(one, name="2k shared + 128, told", contexts=(2176, 2176), shared=2048, is_told=True),
            replace(one, name="prefill 1k", rows=8, query_len=1024, is_graph=False),
        ]
    return tuple(chosen)


FULL = cases((QWEN3, LLAMA))
TINY = (
    Case(name="decode", of=SMALL, rows=3, contexts=(20, 70)),
    Case(name="shared, told", of=SMALL, rows=3, contexts=(70, 70), shared=32, is_told=True),
    Case(name="prefill", of=SMALL, rows=2, contexts=(20, 30), query_len=8, is_graph=False),
)


@dataclass(frozen=True, slots=True)
class Groups:
    """One group of all rows."""

    starts: np.ndarray
    sequences: np.ndarray
    num_pages: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """A case on a device."""

    q: Tensor
    pools: Tensor
    meta: AttentionMetadata
    num_bytes: int
    flops: int


def build(case: Case, device: str) -> Inputs:
    """Random contents; pages in random order."""
    of, rng = case.of, np.random.default_rng(0)
    dtype = torch.float16 if device == "cpu" else torch.bfloat16
    contexts = rng.integers(case.contexts[0], case.contexts[1] + 1, case.rows).astype(np.int32)
    common = case.shared // case.page_size
    width = -(-int(contexts.max()) // case.page_size)
    own = rng.permutation(case.rows * (width - common)).astype(np.int32) + common + 1
    shared = np.broadcast_to(np.arange(1, common + 1, dtype=np.int32), (case.rows, common))
    tables = np.concatenate((shared, own.reshape(case.rows, -1)), axis=1)
    starts = np.arange(case.rows + 1, dtype=np.int32) * np.int32(case.query_len)
    tokens = int(starts[-1])
    pools = torch.empty(2, tables.max() + 1, of.kv_heads, case.page_size, of.head_dim, dtype=dtype, device=device)
    meta = AttentionMetadata(
        query_starts=torch.from_numpy(starts).to(device),
        context_lens=torch.from_numpy(contexts).to(device),
        page_tables=torch.from_numpy(tables).to(device),
        max_query_len=case.query_len,
    )
    pairs = (
        int((contexts - case.query_len).sum()) * case.query_len + case.rows * case.query_len * (case.query_len + 1) // 2
    )
    unique = int(contexts.sum()) - case.shared * (case.rows - 1 if case.is_told else 0)
    return Inputs(
        q=torch.randn(tokens, of.heads, of.head_dim, dtype=dtype, device=device),
        pools=pools.normal_(),
        meta=replace(meta, work={None: _work(case, starts, contexts, width, device)}),
        num_bytes=dtype.itemsize * of.head_dim * (2 * unique * of.kv_heads + 2 * tokens * of.heads),
        flops=4 * pairs * of.heads * of.head_dim,
    )


def _work(case: Case, starts: np.ndarray, contexts: np.ndarray, width: int, device: str) -> AttentionWork:
    from nightmill_kernels.gpu import device_limits
    from nightmill_kernels.gpu.attention_config import num_programs

    of = case.of
    groups = None
    if case.is_told:
        groups = Groups(
            starts=np.array([0, case.rows], dtype=np.int32),
            sequences=np.arange(case.rows, dtype=np.int32),
            num_pages=np.array([case.shared // case.page_size], dtype=np.int32),
        )
    plan = plan_attention(
        starts,
        contexts,
        groups,
        num_tokens=int(starts[-1]),
        group_size=of.heads // of.kv_heads,
        page_size=case.page_size,
        table_width=width,
    )
    programs = plan.num_items * of.kv_heads
    if case.is_graph and device != "cpu":
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        programs = num_programs(
            head_dim=of.head_dim,
            itemsize=2,
            has_wide=plan.has_wide,
            num_sms=num_sms,
            shared_limit=device_limits.shared_limit(torch.device(device)),
        )
    scratch = torch.empty(plan.num_partials, of.heads, of.head_dim, device=device)
    return device_work(
        plan,
        lambda array: torch.from_numpy(array).to(device),
        scratch,
        torch.empty(scratch.shape[:2], device=device),
        num_programs=programs,
    )


def measure(device: str, chosen: Sequence[Case] = FULL) -> Iterator[Figure]:
    """Each case, one after the other; on a CPU inside `use_triton()`."""
    for case in chosen:
        inputs = build(case, device)
        out = torch.full_like(inputs.q, float("nan"))

        def attend(inputs: Inputs = inputs, out: Tensor = out) -> Tensor:
            return _attend(inputs, out)

        seconds = seconds_in_graph([attend] * (1 if device == "cpu" else LAUNCHES), device)
        yield Figure(
            name=case.name,
            model=case.of.model,
            rows=case.rows,
            page_size=case.page_size,
            grid="graph" if case.is_graph else "exact",
            seconds=seconds,
            host_seconds=host_seconds_per_call(attend, device, calls=1 if device == "cpu" else 100),
            bytes_per_s=inputs.num_bytes / seconds,
            flops_per_s=inputs.flops / seconds,
            is_right=_is_right(case, inputs, out),
        )
        del attend, inputs, out  # the next case's pool takes their place


def _attend(inputs: Inputs, out: Tensor) -> Tensor:
    scale = inputs.q.shape[2] ** -0.5
    return paged_attention(inputs.q, inputs.pools[0], inputs.pools[1], inputs.meta, scale=scale, out=out)


def _is_right(case: Case, inputs: Inputs, out: Tensor) -> bool:
    """The last sequences, by the reference on the same device."""
    first = case.rows - CHECKED
    start = first * case.query_len
    meta = AttentionMetadata(
        query_starts=inputs.meta.query_starts[first:] - start,
        context_lens=inputs.meta.context_lens[first:],
        page_tables=inputs.meta.page_tables[first:],
        max_query_len=case.query_len,
    )
    with use_isa(REFERENCE):
        want = paged_attention(
            inputs.q[start:], inputs.pools[0], inputs.pools[1], meta, scale=inputs.q.shape[2] ** -0.5
        )
    finite = bool(torch.isfinite(out).all())
    return finite and bool(((out[start:].float() - want.float()).abs() <= TOLERANCE).all())


@contextmanager
def chunk_of(keys: int) -> Iterator[None]:
    """Plan with chunks of another size."""
    before = work_list.CHUNK
    work_list.CHUNK = keys
    try:
        yield
    finally:
        work_list.CHUNK = before


def sweep(device: str, of: Heads, page_size: int = 16) -> Iterator[tuple[str, float]]:
    """(configuration, bytes per second) of the model's first case."""
    from triton.errors import TritonError

    from nightmill_kernels.gpu import paged_attention as gpu
    from nightmill_kernels.gpu.attention_config import AttentionConfig, choose_config

    case = replace(cases((of,))[0], page_size=page_size)
    chosen = choose_config(head_dim=of.head_dim, itemsize=2, has_wide=False)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    tried: list[tuple[int, AttentionConfig, int | None]] = [
        (chunk, chosen, per_sm) for chunk in (256, 512, 1024) for per_sm in (2, 3, 6)
    ]
    tried += [(chunk, chosen, None) for chunk in (128, 256, 512)]
    tried += [
        # As many programs as their registers are to leave room for.
        (256, AttentionConfig(block_n=n, num_warps=warps, num_stages=stages, programs_per_sm=fit), None)
        for n, warps, stages, fit in (
            (64, 4, 2, 4),
            (64, 4, 4, 2),
            (32, 4, 3, 4),
            (32, 4, 4, 4),
            (64, 8, 3, 3),
            (64, 2, 3, 3),
            (32, 2, 3, 5),
        )
    ]
    for chunk, config, per_sm in tried:
        with chunk_of(chunk):
            inputs = build(replace(case, is_graph=per_sm is not None), device)
        work = inputs.meta.work[None]
        if per_sm is not None:
            work = replace(work, num_programs=num_sms * per_sm)
        meta = replace(inputs.meta, work={None: work})
        out = torch.empty_like(inputs.q)

        def attend(inputs=inputs, meta=meta, out=out, config=config) -> Tensor:  # type: ignore[no-untyped-def]
            return gpu.paged_attention(
                inputs.q,
                inputs.pools[0],
                inputs.pools[1],
                meta,
                scale=inputs.q.shape[2] ** -0.5,
                window=None,
                softcap=None,
                out=out,
                config=config,
            )

        grid = "exact" if per_sm is None else f"{per_sm} per SM"
        name = f"chunk {chunk}, {grid}, {config.block_n} keys, {config.num_warps} warps, {config.num_stages} stages"
        try:
            yield name, inputs.num_bytes / seconds_in_graph([attend] * LAUNCHES, device)
        except (RuntimeError, TritonError) as error:  # does not fit the device: the others may
            print(f"{name}: {error}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small shapes on the CPU")
    parser.add_argument("--sweep", action="store_true", help="other configurations of the first case")
    args = parser.parse_args()
    if not args.tiny and not torch.cuda.is_available():
        sys.exit("torch sees no GPU here; --tiny runs the script on a CPU")
    device = "cpu" if args.tiny else "cuda"
    copied = copy_bytes_per_s(device, 1 << 20 if args.tiny else 1 << 30)
    print(f"copy {copied / 1e9:,.0f} GB/s read and written" + (" (interpreter: no figures)" if args.tiny else ""))
    if args.sweep:
        for of in (QWEN3, LLAMA):
            for name, bytes_per_s in sweep(device, of):
                print(f"{of.model:13} {name:60} {bytes_per_s / 1e9:7,.0f} GB/s {bytes_per_s / copied:7.1%}", flush=True)
        return
    wrong = 0
    print(
        f"{'case':22} {'model':13} {'rows':>4} {'page':>4} grid  {'µs':>8} {'GB/s':>7} {'of copy':>8} {'TFLOP/s':>8} "
        f"{'host µs':>8}"
    )
    with use_triton() if args.tiny else nullcontext():
        for f in measure(device, TINY if args.tiny else FULL):
            wrong += not f.is_right
            print(
                f"{f.name:22} {f.model:13} {f.rows:4} {f.page_size:4} {f.grid} {f.seconds * 1e6:8.1f} "
                f"{f.bytes_per_s / 1e9:7,.0f} {f.bytes_per_s / copied:8.1%} {f.flops_per_s / 1e12:8.1f} "
                f"{f.host_seconds * 1e6:8.1f} {'' if f.is_right else 'WRONG'}",
                flush=True,
            )
    if wrong:
        sys.exit(f"{wrong} cases differ from the reference")


if __name__ == "__main__":
    main()
