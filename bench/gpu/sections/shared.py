"""Shared prefixes on and off, swap against recompute, and a steady state, on Qwen3-0.6B's shape."""

import numpy as np

from bench.gpu.bound import bound_seconds, decode_seconds
from bench.gpu.clock import seconds_of, synchronize
from bench.gpu.engine_run import build, loop_options, opened, run_rows
from bench.gpu.notebook import Notebook
from bench.gpu.section import Task
from bench.gpu.workloads import shared_rows, staggered, steady_rows
from bench.model_step import plan
from nightmill_worker.engine.step import Swaps
from nightmill_worker.model.device_runner import DeviceRunner
from nightmill_worker.simulate.cost_model import MODELS, CostModel

MODEL = "qwen3-0.6b"
OWN = 64
SWAP_BYTES = 4 << 30


def run(notebook: Notebook, task: Task) -> None:
    cost = CostModel(task.ceilings.device, MODELS[MODEL])
    name = "tiny" if task.is_tiny else MODEL
    with opened(build(name, task.device, swap_bytes=(1 << 20) if task.is_tiny else SWAP_BYTES)) as runner:
        with notebook.attempt("shared attention"):
            shared_attention(notebook, task, runner, cost)
        with notebook.attempt("swap against recompute"):
            swap_or_recompute(notebook, task, runner)
        with notebook.attempt("a steady state"):
            steady_state(notebook, task, runner, cost)


def shared_attention(notebook: Notebook, task: Task, runner: DeviceRunner, cost: CostModel) -> None:
    """256 decodes of 64 tokens behind 2,048 that all have in common."""
    count, shared, out = (8, 160, 4) if task.is_tiny else (256, 2048, 96)
    rows = shared_rows(count, shared=shared, own=OWN, tokens_out=out, vocab_size=500 if task.is_tiny else 10_000)
    run_rows(runner, staggered(rows, 4), task.device)
    runs = {}
    for is_on in (True, False):
        runs[is_on] = run_rows(runner, rows, task.device, options=loop_options(enable_shared_attention=is_on))
        r = runs[is_on]
        notebook.check(
            f"shared attention {'on' if is_on else 'off'}: every answer has its length",
            r.wrong_rows == 0 and r.errors == 0,
            f"{r.wrong_rows} wrong, {r.errors} errors",
        )
    on, off = runs[True], runs[False]
    notebook.check("rows were in a group only where it was on", on.shared_rows > 0 and off.shared_rows == 0)
    same = sum(a == b for a, b in zip(on.tokens, off.tokens, strict=True))
    context = shared + OWN + out // 2
    best = decode_seconds(cost, count, context) / decode_seconds(cost, count, context, shared)
    notebook.figure(
        f"decode step, {count} rows behind {shared:,} shared tokens, shared attention off", off.decode_step_ms, "ms"
    )
    notebook.figure(
        "the same with it on",
        on.decode_step_ms,
        "ms",
        f"{off.decode_step_ms / on.decode_step_ms:.2f} times faster; at best {best:.2f}",
        headline=True,
    )
    notebook.figure("rows with the same draws, on and off", same, f"of {count}")
    notebook.figure(
        "prompt tokens from the prefix index", on.cached_tokens, "", f"of {on.prompt_tokens:,} in the run with it on"
    )


def swap_or_recompute(notebook: Notebook, task: Task, runner: DeviceRunner) -> None:
    """What a token of a preempted sequence costs to bring back."""
    if not isinstance(runner, Swaps) or runner.host.num_pages == 0:
        notebook.note("this runner does not swap")
        return
    page_size = runner.pool.page_size
    count = min(runner.host.num_pages, runner.pool.num_pages - 1, 4 if task.is_tiny else 4096 // page_size * 4)
    pages = (np.random.default_rng(0).permutation(runner.pool.num_pages - 1)[:count] + 1).astype(np.int32)
    places = np.arange(count, dtype=np.int32)
    found = {}
    for name, copy in (
        ("swap out", lambda: runner.swap_out(pages, places)),
        ("swap in", lambda: runner.swap_in(places, pages)),
    ):

        def copy_and_wait(copy=copy) -> None:  # type: ignore[no-untyped-def]
            copy()
            synchronize(task.device)

        found[name] = seconds_of(copy_and_wait, "cpu", repeats=5, warm_up=2) / (count * page_size)
        rate = runner.pool.bytes_per_token / found[name] / 1e9
        notebook.figure(name, 1e6 * found[name], "µs/token", f"{rate:.1f} GB/s, {count} scattered pages", headline=True)
    length = 64 if task.is_tiny else 2048
    batch = 1 if task.is_tiny else 4
    step = plan(runner, batch, length, length, "greedy")
    seconds = seconds_of(lambda: runner.run(step), "cpu", repeats=3 if task.is_tiny else 7) / (batch * length)
    notebook.figure("recompute", 1e6 * seconds, "µs/token", f"prefill of {batch} × {length:,} tokens", headline=True)
    both = found["swap out"] + found["swap in"]
    notebook.figure("swap out and in over recompute", both / seconds, "", "below 1: swap pays")
    if runner.host.bytes_per_s > 0:
        notebook.figure("host link as the runner measured it", runner.host.bytes_per_s / 1e9, "GB/s")


def steady_state(notebook: Notebook, task: Task, runner: DeviceRunner, cost: CostModel) -> None:
    """W5 with fewer rows: 1,000 tokens in and out, twice as many rows as places."""
    count, length = (300, 3) if task.is_tiny else (512, 1000)
    rows = steady_rows(count, tokens_in=length, tokens_out=length, vocab_size=500 if task.is_tiny else 10_000)
    least = bound_seconds(cost, rows)
    if not notebook.has_time_for(f"{count} rows of {length:,} tokens in and out", 1.0 if task.is_tiny else 1.8 * least):
        return
    r = run_rows(runner, rows, task.device)
    notebook.check(
        f"{count} × {length:,}/{length:,}: exact lengths",
        r.output_tokens == count * length and r.wrong_rows == 0 and r.errors == 0,
        f"{r.output_tokens:,} tokens, {r.wrong_rows} wrong, {r.errors} errors",
    )
    notebook.figure(
        f"W5, {count} rows, {MODEL}",
        r.tokens_per_s,
        "output tok/s",
        f"{100 * least / r.seconds:.0f} % of the bound; {r.steps:,} steps, {r.mean_batch:.0f} rows, "
        f"{r.preemptions} preemptions, host {r.host_ms:.2f} ms, device {r.device_ms:.2f} ms",
        headline=True,
    )
