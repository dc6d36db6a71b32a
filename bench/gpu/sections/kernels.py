"""Kernels on their own, by the benches that stand beside them: attention first, then the memory-bound ones, draws."""

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from bench.gpu.notebook import Notebook
from bench.gpu.section import Task
from nightmill_kernels.backend import use_triton


def run(notebook: Notebook, task: Task) -> None:
    for name, part in PARTS.items():
        with notebook.attempt(name):
            part(notebook, task)


def _in_triton(task: Task) -> AbstractContextManager[None]:
    """On a CPU, in its interpreter."""
    return use_triton() if task.is_tiny else nullcontext()


def pointwise(notebook: Notebook, task: Task) -> None:
    bench: Any = importlib.import_module("bench.gpu.pointwise")
    shapes, tokens = ((bench.TINY,), (5,)) if task.is_tiny else ((bench.QWEN3, bench.LLAMA), bench.TOKENS)
    rows = []
    with _in_triton(task):
        for f in bench.measure(task.device, shapes, tokens):
            share = 100 * f.bytes_per_s / task.ceilings.bytes_per_s
            rows.append([f.name, f.model, f.tokens, 1e6 * f.seconds, f.bytes_per_s / 1e9, share, 1e6 * f.host_seconds])
            notebook.say(f"{f.name} {f.model} {f.tokens}: {1e6 * f.seconds:.1f} µs, {share:.0f} % of copy bandwidth")
            if notebook.seconds_left < 5:
                notebook.note("the other memory-bound operations were left out for want of time")
                break
    columns = ["operation", "model", "tokens", "µs", "GB/s", "% of copy bandwidth", "host µs"]
    notebook.table("Memory-bound operations, bf16, in a graph", columns, rows)
    shares = sorted(row[5] for row in rows if row[2] == max(tokens))
    notebook.figure(
        f"memory-bound operations at {max(tokens):,} tokens, median",
        shares[len(shares) // 2],
        "% of copy bandwidth",
        f"{shares[0]:.0f} to {shares[-1]:.0f}",
        headline=True,
    )


PARTS: dict[str, Callable[[Notebook, Task], None]] = {"memory-bound operations": pointwise}
