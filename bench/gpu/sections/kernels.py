"""Kernels on their own, by the benches that stand beside them: attention first, then the memory-bound ones, draws."""

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from bench.gpu.notebook import Notebook
from bench.gpu.section import Task
from nightmill_kernels.backend import use_triton

TINY_DRAWS = 2  # in the interpreter, filters take a second a draw


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
            if not notebook.has_time_for("the other memory-bound operations", 5):
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


def attention(notebook: Notebook, task: Task) -> None:
    bench: Any = importlib.import_module("bench.gpu.attention")
    rows, wrong = [], []
    with _in_triton(task):
        for f in bench.measure(task.device, bench.TINY if task.is_tiny else bench.FULL):
            share = 100 * f.bytes_per_s / task.ceilings.bytes_per_s
            name = f"{f.name}, {f.rows} rows, {f.model}, page {f.page_size}, {f.grid} grid"
            wrong += [] if f.is_right else [name]
            verdict = "as the reference" if f.is_right else "WRONG"
            figures = (1e6 * f.seconds, f.bytes_per_s / 1e9, share, f.flops_per_s / 1e12, 1e6 * f.host_seconds)
            rows.append([f.name, f.model, f.rows, f.page_size, f.grid, *figures, verdict])
            text = f"{1e6 * f.seconds:.1f} µs, {f.flops_per_s / 1e12:.0f} TFLOP/s{'' if f.is_right else ', WRONG'}"
            # Of these it is the bandwidth that counts; of prefills, the rate.
            if f.name.startswith("prefill"):
                notebook.figure(f"attention, {name}", f.flops_per_s / 1e12, "TFLOP/s", text)
            else:
                is_target = f.name == "decode 1k" and f.grid == "graph"
                notebook.figure(f"attention, {name}", share, "% of copy bandwidth", text, headline=is_target)
    columns = ["case", "model", "rows", "page", "grid", "µs", "GB/s", "% of copy bandwidth"]
    notebook.table("Attention of one layer, bf16", [*columns, "TFLOP/s", "host µs", "result"], rows)
    notebook.check("attention is the reference's", bool(rows) and not wrong, "; ".join(wrong))


def sweep(notebook: Notebook, task: Task) -> None:
    """Other launch configurations of the case that has a target."""
    bench: Any = importlib.import_module("bench.gpu.attention")
    rows: list[list[object]] = []
    for of in (bench.QWEN3, bench.LLAMA):
        with notebook.attempt(f"sweep, {of.model}"):
            for name, bytes_per_s in bench.sweep(task.device, of):
                share = 100 * bytes_per_s / task.ceilings.bytes_per_s
                rows.append([of.model, name, bytes_per_s / 1e9, share])
                notebook.say(f"{of.model} {name}: {share:.1f} % of copy bandwidth")
                if not notebook.has_time_for("the rest of the sweep", 5):
                    break
    notebook.table("Decode attention, 256 rows at 1,024", ["model", "launch", "GB/s", "% of copy bandwidth"], rows)
    for of in (bench.QWEN3, bench.LLAMA):
        best = max((row for row in rows if row[0] == of.model), key=lambda row: row[3], default=None)
        if best is not None:
            notebook.figure(f"best of the sweep, {of.model}", best[3], "% of copy bandwidth", best[1], headline=True)


def draws(notebook: Notebook, task: Task) -> None:
    bench: Any = importlib.import_module("bench.gpu.draw")
    rows = []
    with _in_triton(task):
        for f in bench.measure(task.device, ((2, 300),) if task.is_tiny else bench.FULL):
            floor = f.seconds * f.bytes_per_s / task.ceilings.bytes_per_s
            name = f"{f.kind}, {f.logits} logits, {f.rows} × {f.vocab:,}"
            rows.append([f.kind, f.logits, f.rows, f.vocab, 1e6 * f.seconds, 1e6 * floor, 1e6 * f.host_seconds])
            notebook.say(f"draw {name}: {1e6 * f.seconds:.1f} µs, one read of the logits {1e6 * floor:.1f}")
            if not f.same_ids:
                notebook.check(f"draw {name}: the reference's ids", False)
            if not notebook.has_time_for("the other draws", 8) or (task.is_tiny and len(rows) == TINY_DRAWS):
                break
    columns = ["rows", "logits", "count", "vocabulary", "µs", "µs of one read", "host µs"]
    notebook.table("Draws, bf16, in a graph", columns, rows)
    notebook.check("draws are the reference's", bool(rows), f"{len(rows)} kinds compared, {bench.CHECKED} rows of each")
    for row in rows:
        if row[2] == max(r[2] for r in rows) and row[1] == "model" and row[3] == rows[0][3]:
            note = f"one read of the logits {row[5]:.1f} µs"
            notebook.figure(f"draw, {row[0]}, {row[2]} rows", row[4], "µs", note, headline=row[0] in ("plain", "top-p"))


PARTS: dict[str, Callable[[Notebook, Task], None]] = {
    "attention": attention,
    "draws": draws,
    "memory-bound operations": pointwise,
}
