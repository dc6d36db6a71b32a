"""Where the time of a step goes, by torch's profiler: a decode step and a mixed one of Qwen3-0.6B's shape."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.gpu.clock import synchronize
from bench.gpu.engine_run import build, loop_options, opened
from bench.gpu.notebook import Notebook
from bench.gpu.section import Task
from bench.gpu.workloads import requests_of, steady_rows
from nightmill_worker.engine.loop import EngineLoop
from nightmill_worker.model.device_runner import DeviceRunner

MODEL = "qwen3-0.6b"
STEPS = 20
OURS = {
    "attention_kernel": "attention",
    "merge_kernel": "merge",
    "_qk_norm_rope": "norms, rope, KV write",
    "_rope": "norms, rope, KV write",
    "_store_kv": "norms, rope, KV write",
    "_rms_norm": "norms, rope, KV write",
    "_gated_mul": "activation",
    "_move_pages": "swap",
    **dict.fromkeys(("_piece_keys", "_best_key", "_survey", "_contest", "_settle"), "sampling"),
    **dict.fromkeys(("_threshold", "_gather", "_search"), "sampling"),
}
"""Our kernels, by name."""
OTHERS = (
    ("GEMM", ("gemm", "gemv", "nvjet", "cutlass", "xmma", "cublas", "splitk", "linear", "addmm", "aten::mm")),
    ("copies between host and device", ("htod", "dtoh")),
    (
        "torch's own",
        ("memcpy", "memset", "at::native", "elementwise", "gather", "index", "copy", "embedding", "aten::"),
    ),
)
"""Everybody else's, by the first kind of which the name has a part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """All launches of one name."""

    name: str
    count: int
    us: float


def run(notebook: Notebook, task: Task) -> None:
    with opened(build("tiny" if task.is_tiny else MODEL, task.device)) as runner:
        with notebook.attempt("decode steps"):
            decode_steps(notebook, task, runner)
        with notebook.attempt("a mixed step"):
            mixed_step(notebook, task, runner)


def decode_steps(notebook: Notebook, task: Task, runner: DeviceRunner) -> None:
    """256 rows with contexts about 1,024 long."""
    count, length = (4, 20) if task.is_tiny else (256, 1000)
    loop = _decoding(runner, count, length)
    _, wall = _profiled(task, lambda: _steps(loop, STEPS))
    kernels, _ = _profiled(task, lambda: _steps(loop, STEPS), trace=True)
    _end(loop)
    _report(notebook, kernels, wall, STEPS, f"decode, {count} rows at {length + 40:,}", "profile-decode.txt")


def mixed_step(notebook: Notebook, task: Task, runner: DeviceRunner) -> None:
    """Decodes with prompts beside them: every second step has chunks of new prompts up to the step's budget."""
    count, length = (4, 20) if task.is_tiny else (248, 1000)
    loop = _decoding(runner, count, length, room=8)
    fresh = steady_rows(16, tokens_in=length, tokens_out=2, vocab_size=500 if task.is_tiny else 10_000)
    batches = [
        requests_of(fresh[:8], temperature=0.6, first_id=1000),
        requests_of(fresh[8:], temperature=0.6, first_id=2000),
    ]

    def mixed(batch: int) -> None:
        for request in batches[batch]:
            loop.add(request)
        _steps(loop, 2)

    _, wall = _profiled(task, lambda: mixed(0))
    kernels, _ = _profiled(task, lambda: mixed(1), trace=True)
    _end(loop)
    _report(notebook, kernels, wall, 2, f"mixed, {count} decodes and 8 prompts of {length:,}", "profile-mixed.txt")


def _decoding(runner: DeviceRunner, count: int, length: int, room: int = 0) -> EngineLoop:
    """A loop in which `count` rows decode."""
    loop = EngineLoop(runner, loop_options(max_num_seqs=count + room))
    for request in requests_of(steady_rows(count, tokens_in=length, tokens_out=400, vocab_size=500), temperature=0.6):
        loop.add(request)
    while loop.counters.generated_tokens < 3 * count:
        loop.step()
    return loop


def _end(loop: EngineLoop) -> None:
    """Leave nothing in flight: the runner goes on."""
    loop.cancel(range(3000))
    while loop.has_work:
        loop.step()


def _steps(loop: EngineLoop, count: int) -> None:
    for _ in range(count):
        loop.step()


def _profiled(task: Task, work: Callable[[], None], *, trace: bool = False) -> tuple[list[Kernel], float]:
    """Kernels by time, and seconds by the host's clock (which tracing makes longer: measure it without)."""
    import time

    from torch.profiler import ProfilerActivity, profile

    synchronize(task.device)
    begun = time.perf_counter()
    if not trace:
        work()
        synchronize(task.device)
        return [], time.perf_counter() - begun
    activities = [ProfilerActivity.CPU] if task.is_tiny else [ProfilerActivity.CUDA]
    with profile(activities=activities) as profiler:
        work()
        synchronize(task.device)
    return _kernels(profiler, task), time.perf_counter() - begun


def _kernels(profiler: Any, task: Task) -> list[Kernel]:
    from torch.autograd import DeviceType

    # What ran on the device itself: an operator on the host has the time of its kernels, too.
    where = DeviceType.CPU if task.is_tiny else DeviceType.CUDA
    found = [average for average in profiler.key_averages() if average.device_type == where]
    times = [(a.key, a.count, a.self_cpu_time_total if task.is_tiny else a.self_device_time_total) for a in found]
    kernels = [Kernel(name=name, count=count, us=us) for name, count, us in times if us > 0]
    return sorted(kernels, key=lambda kernel: -kernel.us)


def _report(notebook: Notebook, kernels: Sequence[Kernel], wall: float, steps: int, name: str, file: str) -> None:
    notebook.check(f"{name}: the profiler saw kernels", bool(kernels))
    busy = sum(kernel.us for kernel in kernels)
    kinds: dict[str, float] = {}
    for kernel in kernels:
        kind = kind_of(kernel.name)
        kinds[kind] = kinds.get(kind, 0.0) + kernel.us
    per_step = 1e6 * wall / steps
    lines = [[kind, us / steps, 100 * us / steps / per_step] for kind, us in sorted(kinds.items(), key=lambda k: -k[1])]
    gap = per_step - busy / steps
    lines.append(["nothing ran", gap, 100 * gap / per_step])
    notebook.table(f"A step, {name}", ["part", "µs", "% of the step"], lines)
    notebook.figure(
        f"step, {name}",
        per_step / 1e3,
        "ms",
        ", ".join(f"{kind} {share:.0f} %" for kind, _, share in lines if share >= 1),
        headline=True,
    )
    text = [f"{name}: {per_step:.0f} µs a step by the host's clock, {busy / steps:.0f} µs of kernels", ""]
    text += [f"{'µs/step':>10} {'share':>6} {'calls/step':>10}  kind               kernel"]
    text += [
        f"{k.us / steps:10.1f} {100 * k.us / busy:5.1f}% {k.count / steps:10.1f}  {kind_of(k.name):18} {k.name[:120]}"
        for k in kernels[:60]
    ]
    notebook.file(file, "\n".join(text) + "\n")


def kind_of(kernel: str) -> str:
    """What a kernel is for, by its name."""
    ours = next((kind for name, kind in OURS.items() if kernel == name or kernel.startswith(f"{name}_")), None)
    if ours is not None:
        return ours
    lower = kernel.lower()
    return next((kind for kind, parts in OTHERS if any(part in lower for part in parts)), "other")
