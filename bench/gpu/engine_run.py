"""Runs requests through the engine and a model's runner in this process, timed, lengths verified."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.gpu import clock
from bench.gpu.switches import GRAPHS, RUN_AHEAD
from bench.gpu.workloads import Row, requests_of
from nightmill.records import EngineOptions, ModelSpec
from nightmill_worker.engine.loop import EngineLoop
from nightmill_worker.engine.options import LoopOptions
from nightmill_worker.engine.request import Finished
from nightmill_worker.engine.step import Runner
from nightmill_worker.model.config_reader import read_config
from nightmill_worker.model.device import Device
from nightmill_worker.model.device_choice import resolve_limits
from nightmill_worker.model.device_runner import DeviceRunner
from nightmill_worker.model.device_start import start_on_device
from nightmill_worker.model.dummy import dummy_weights
from nightmill_worker.model.runner import ModelRunnerConfig
from nightmill_worker.model.weights import load_weights

CONFIGS = Path(__file__).parent / "configs"
BUDGET = 8192  # tokens in one step


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """One timed run."""

    seconds: float
    prompt_tokens: int
    output_tokens: int
    wrong_rows: int  # whose answer does not have the length it was asked for
    errors: int
    steps: int
    mean_batch: float
    host_ms: float  # of a step: plan, build, commit
    run_ms: float  # of a step: in the runner, as the host sees it
    device_ms: float  # of a step, as the runner says
    decode_step_ms: float  # median of steps in which every row decoded; nan when there was none
    tokens_per_step: float  # computed
    peak_pages: float  # share of the pool
    recomputed_tokens: int
    preemptions: int
    steps_ahead: int  # submitted while the one before ran
    shared_rows: int  # rows of all steps that were in a prefix group
    cached_tokens: int
    tokens: tuple[tuple[int, ...], ...]  # by row

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of wall time."""
        return self.output_tokens / self.seconds


def build(name: str, device: str, **changes: Any) -> DeviceRunner:
    """A runner with random weights, made on the device, of one of the shapes in configs/.

    Args:
        name: The folder's name.
        device: cpu or cuda.
        changes: Of EngineOptions, where it has such a field; and max_model_len, dtype.
    """
    spec = ModelSpec(
        model=name,
        load_format="dummy",
        dtype=changes.pop("dtype", "float32" if device == "cpu" else "bfloat16"),
        max_model_len=changes.pop("max_model_len", 4096),
    )
    defaults: dict[str, Any] = {"pool_bytes": 64 << 20} if device == "cpu" else {}
    return start(CONFIGS / name, spec, engine_options(device, **(defaults | changes)))


def start(directory: Path, spec: ModelSpec, options: EngineOptions) -> DeviceRunner:
    """The runner that a GPU gets. On a CPU too, over a device that does everything at once: the script's rehearsal."""
    config = ModelRunnerConfig(model_dir=directory, spec=spec, options=options)
    if options.device != "cpu":
        runner = config.build()
        assert isinstance(runner, DeviceRunner)
        return runner
    shape = read_config(directory)
    return start_on_device(
        shape,
        Device(),
        options,
        resolve_limits(options, "cpu"),
        lambda dtype, where: (
            dummy_weights(shape, dtype, where)
            if spec.load_format == "dummy"
            else load_weights(directory, shape, dtype, where)
        ),
        dtype=spec.dtype,
        max_model_len=shape.resolve_max_model_len(spec.max_model_len),
    )


def engine_options(device: str, **changes: Any) -> EngineOptions:
    """No host pool unless asked for: page-locking gigabytes takes seconds."""
    limits: dict[str, Any] = {"max_num_seqs": 256, "max_num_batched_tokens": BUDGET, "swap_bytes": 0}
    return EngineOptions(**({"device": device} | limits | dict(GRAPHS.default) | changes))


def loop_options(**changes: Any) -> LoopOptions:
    """256 rows at once, 8,192 tokens in a step, and a step in flight beside the one being planned."""
    limits: dict[str, Any] = {"max_num_seqs": 256, "max_num_batched_tokens": BUDGET, "max_model_len": 4096}
    return LoopOptions(**(limits | dict(RUN_AHEAD.default) | changes))


def run_rows(
    runner: Runner,
    rows: Sequence[Row],
    device: str,
    *,
    temperature: float = 0.6,
    options: LoopOptions | None = None,
    after_step: Callable[[EngineLoop], None] | None = None,
) -> EngineRun:
    """Answer all rows from an empty prefix index. The runner stays open."""
    loop = EngineLoop(runner, options or loop_options())
    requests = requests_of(rows, temperature=temperature)
    clock.synchronize(device)
    begun = time.perf_counter()
    for request in requests:
        loop.add(request)
    ended: list[Finished] = []
    decode_steps: list[float] = []
    counters, computed, before = loop.counters, 0, time.perf_counter()
    while loop.has_work:
        ended += loop.step()
        now = time.perf_counter()
        if counters.computed_tokens - computed == len(rows):
            decode_steps.append(now - before)
        computed, before = counters.computed_tokens, now
        if after_step is not None:
            after_step(loop)
    seconds = time.perf_counter() - begun
    return _summary(loop, rows, ended, seconds, decode_steps)


def _summary(
    loop: EngineLoop, rows: Sequence[Row], ended: Sequence[Finished], seconds: float, decode_steps: list[float]
) -> EngineRun:
    stats = loop.stats()
    by_id = {f.request_id: f for f in ended}
    answers = tuple(tuple(by_id[i].token_ids) if i in by_id else () for i in range(len(rows)))
    steps = max(1, stats.steps)
    return EngineRun(
        seconds=seconds,
        prompt_tokens=stats.prompt_tokens,
        output_tokens=sum(map(len, answers)),
        wrong_rows=sum(len(answer) != row.max_tokens for answer, row in zip(answers, rows, strict=True)),
        errors=stats.errors,
        steps=stats.steps,
        mean_batch=stats.mean_batch,
        host_ms=1e3 * (stats.plan_s + stats.build_s + stats.commit_s) / steps,
        run_ms=1e3 * stats.run_s / steps,
        device_ms=1e3 * stats.device_s / steps,
        decode_step_ms=1e3 * median(decode_steps) if decode_steps else float("nan"),
        tokens_per_step=stats.tokens_per_step,
        peak_pages=stats.peak_pages / stats.pages_total,
        recomputed_tokens=stats.recomputed_tokens,
        preemptions=stats.preemptions,
        steps_ahead=stats.steps_ahead,
        shared_rows=stats.shared_attention_rows,
        cached_tokens=stats.cached_tokens,
        tokens=answers,
    )


@contextmanager
def opened(runner: DeviceRunner) -> Iterator[DeviceRunner]:
    """Close it in the end: the next one needs the memory."""
    try:
        yield runner
    finally:
        runner.close()
