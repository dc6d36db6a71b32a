"""What the device can do at best: the ceilings that every other figure is held against."""

import torch

from bench.gpu import clock
from bench.gpu.notebook import Notebook
from bench.gpu.section import Task
from nightmill_worker.simulate.cost_model import MODELS, ModelShape

DECODE_ROWS = 256


def run(notebook: Notebook, task: Task) -> None:
    bandwidth = copy_bandwidth(notebook, task)
    large_gemm(notebook, task)
    link(notebook, task)
    launches(notebook, task)
    for name in ("qwen3-0.6b", "llama-3.1-8b"):
        decode_gemms(notebook, task, MODELS[name], bandwidth)


def copy_bandwidth(notebook: Notebook, task: Task) -> float:
    """Bytes per second from device to device, counting what is read and what is written; several times any cache."""
    size = 1 << 12 if task.is_tiny else 4 << 30
    source = torch.randint(0, 127, (size,), dtype=torch.int8, device=task.device)
    target = torch.empty_like(source)
    seconds = clock.seconds_of(lambda: target.copy_(source), task.device)
    notebook.check("a copy copies", bool(torch.equal(source[-64:], target[-64:])))
    notebook.figure("copy bandwidth", 2 * size / seconds / 1e9, "GB/s", f"{size / 2**30:.3g} GiB", headline=True)
    return 2 * size / seconds


def large_gemm(notebook: Notebook, task: Task) -> None:
    n = 32 if task.is_tiny else 8192
    a, b = (torch.randn(n, n, device=task.device).bfloat16() for _ in range(2))
    seconds = clock.seconds_of(lambda: a @ b, task.device)
    notebook.figure("GEMM 8192³ bf16", 2 * n**3 / seconds / 1e12, "TFLOP/s", "random data", headline=True)


def link(notebook: Notebook, task: Task) -> None:
    """Page-locked host memory to the device and back."""
    size = 1 << 12 if task.is_tiny else 512 << 20
    host = torch.zeros(size, dtype=torch.int8, pin_memory=not task.is_tiny)
    there = torch.empty(size, dtype=torch.int8, device=task.device)
    for name, work in (
        ("host to device", lambda: there.copy_(host, non_blocking=True)),
        ("device to host", lambda: host.copy_(there, non_blocking=True)),
    ):
        seconds = clock.seconds_of(work, task.device, repeats=5, warm_up=1)
        notebook.figure(name, size / seconds / 1e9, "GB/s", "page-locked", headline=True)


def launches(notebook: Notebook, task: Task) -> None:
    from bench.gpu.empty_kernel import add_one

    cell = torch.zeros(1, device=task.device)
    calls = 3 if task.is_tiny else 1000

    def launch() -> None:
        add_one[(1,)](cell)

    host = clock.host_seconds_per_call(launch, task.device, calls=calls)
    notebook.check("a Triton kernel runs", float(cell) == calls + 3, f"{float(cell):.0f} of {calls + 3} launches")
    notebook.figure("Triton launch", 1e6 * host, "µs", "host time of a launch", headline=True)
    in_graph = clock.seconds_in_graph([launch] * (2 if task.is_tiny else 100), task.device)
    notebook.figure("launch in a graph", 1e6 * in_graph, "µs", "device time, one of 100 kernels in a graph")
    if not task.is_tiny:
        graph = clock.captured([launch] * 100)
        host = clock.host_seconds_per_call(graph.replay, task.device, calls=200)
        notebook.figure("graph replay", 1e6 * host, "µs", "host time of a replay of 100 kernels")


def decode_gemms(notebook: Notebook, task: Task, shape: ModelShape, bandwidth: float) -> None:
    """The products of a decode step with 256 rows; weights rotate, so that they come from memory."""
    rows = []
    for name, k, n in _products(shape):
        rows.append([name, k, n, *_measure(task, 8 if task.is_tiny else DECODE_ROWS, k, n)])
    per_step = sum(row[3] * (1 if row[0] == "head" else shape.layers) for row in rows) / 1e3
    at_best = shape.step_weight_bytes / bandwidth * 1e3
    notebook.table(
        f"GEMMs of a decode step, {shape.name}, {DECODE_ROWS} rows, in a graph",
        ["product", "k", "n", "µs", "TFLOP/s", "weights GB/s"],
        rows,
    )
    notebook.figure(
        f"GEMMs of a decode step, {shape.name}",
        per_step,
        "ms",
        f"{shape.layers} layers and the head; reading the weights takes {at_best:.3g} ms at copy bandwidth",
    )


def _products(shape: ModelShape) -> list[tuple[str, int, int]]:
    heads = shape.heads * shape.head_dim
    return [
        ("qkv", shape.hidden, heads + 2 * shape.kv_heads * shape.head_dim),
        ("out", heads, shape.hidden),
        ("gate and up", shape.hidden, 2 * shape.ffn),
        ("down", shape.ffn, shape.hidden),
        ("head", shape.hidden, shape.vocab),
    ]


def _measure(task: Task, m: int, k: int, n: int) -> list[float]:
    """µs, TFLOP/s, GB/s of weights."""
    if task.is_tiny:
        k, n = min(k, 64), min(n, 64)
    copies = 2 if task.is_tiny else max(2, -(-(256 << 20) // (2 * k * n)))
    x = torch.randn(m, k, device=task.device).bfloat16()
    weights = [torch.randn(n, k, device=task.device).bfloat16() for _ in range(copies)]
    works = [lambda w=w: torch.nn.functional.linear(x, w) for w in weights]
    seconds = clock.seconds_in_graph(works, task.device, repeats=5)
    return [1e6 * seconds, 2 * m * k * n / seconds / 1e12, 2 * k * n / seconds / 1e9]
