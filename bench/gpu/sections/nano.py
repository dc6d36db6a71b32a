"""W4, the nano bench: 256 rows with dummy weights; tokens per second and the share of what the device could do."""

import math
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.gpu.bound import bound_seconds, decode_seconds
from bench.gpu.clock import seconds_of
from bench.gpu.engine_run import EngineRun, build, loop_options, opened, run_rows
from bench.gpu.notebook import Notebook
from bench.gpu.section import Task
from bench.gpu.switches import GRAPHS, RUN_AHEAD, Switch
from bench.gpu.workloads import W4_TOKENS_IN, W4_TOKENS_OUT, Row, staggered, w4_rows
from bench.model_step import plan
from nightmill_worker.engine.options import LoopOptions
from nightmill_worker.model.device_runner import DeviceRunner
from nightmill_worker.simulate.cost_model import MODELS, CostModel

TEMPERATURE = 0.6
CONTEXT = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Nano:
    """One model's nano bench."""

    model: str
    runs: int  # of the whole workload with everything on
    target: float  # output tokens per second


def run_nano(notebook: Notebook, task: Task, nano: Nano) -> None:
    cost = CostModel(task.ceilings.device, MODELS[nano.model])
    rows = _rows(task)
    bench = _Bench(notebook, task, nano, rows, bound_seconds(cost, rows))
    best: EngineRun | None = None
    with notebook.attempt("the whole workload"):
        begun = time.perf_counter()
        with opened(bench.build()) as runner:
            notebook.figure("loaded, measured and recorded in", time.perf_counter() - begun, "s")
            notebook.say(f"pool: {runner.pool.num_pages:,} pages of {runner.pool.page_size} tokens")
            bench.warm_up(runner)
            with notebook.attempt("a decode step"):
                _decode_step(notebook, task, runner, cost)
            # The simplest way first: a figure stands before anything cleverer may hang.
            best = simple = bench.run(runner, [], RUN_AHEAD)
            if RUN_AHEAD.can_compare:
                best = bench.run_ahead(runner, simple)
    if GRAPHS.can_compare and notebook.has_time_for(f"W4 {GRAPHS.without}", 15 + 3 * best.seconds if best else 30):
        with notebook.attempt(GRAPHS.without), opened(bench.build(**GRAPHS.off)) as runner:
            bench.warm_up(runner)
            bench.run(runner, [best] if best else [], GRAPHS)


@dataclass(frozen=True, slots=True)
class _Bench:
    """One model's runs over the workload."""

    notebook: Notebook
    task: Task
    nano: Nano
    rows: list[Row]
    bound_s: float

    def build(self, **changes: Any) -> DeviceRunner:
        return build("tiny" if self.task.is_tiny else self.nano.model, self.task.device, **changes)

    def warm_up(self, runner: DeviceRunner) -> None:
        """Compile and record all there is: every batch size, prompts in chunks."""
        short = staggered(self.rows, 4 if self.task.is_tiny else 48)
        options = loop_options(**RUN_AHEAD.off)
        run = run_rows(runner, short, self.task.device, temperature=TEMPERATURE, options=options)
        self.notebook.say(f"warm after {run.seconds:.1f} s")

    def run(self, runner: DeviceRunner, others: Sequence[EngineRun], switch: Switch) -> EngineRun:
        """One run with something turned off; `others` to compare with."""
        ahead = RUN_AHEAD.off if switch is RUN_AHEAD else RUN_AHEAD.default
        run = self._timed(runner, switch.without, loop_options(**ahead))
        for other in others:
            ratio = other.tokens_per_s / run.tokens_per_s
            self.notebook.figure(f"everything on against {switch.without}", ratio, "times")
            _same_draws(self.notebook, run, other, switch.without)
        note = f"{100 * self.bound_s / run.seconds:.0f} % of the bound"
        self.notebook.figure(
            f"W4 {self.nano.model} {switch.without}", run.tokens_per_s, "output tok/s", note, headline=True
        )
        return run

    def run_ahead(self, runner: DeviceRunner, simple: EngineRun) -> EngineRun:
        """With a step in flight beside the one being planned: as the product runs."""
        runs: list[EngineRun] = []
        for turn in range(1 if self.task.is_tiny else self.nano.runs):
            if runs and not self.notebook.has_time_for(f"run {turn + 1}", 1.3 * runs[-1].seconds):
                break
            runs.append(self._timed(runner, f"everything on, run {turn + 1}", loop_options()))
        middle = sorted(runs, key=lambda run: run.seconds)[(len(runs) - 1) // 2]
        rates = ", ".join(f"{run.tokens_per_s:,.0f}" for run in runs)
        note = f"runs: {rates}; target {self.nano.target:,.0f}"
        self.notebook.figure(f"W4 {self.nano.model}", middle.tokens_per_s, "output tok/s", note, headline=True)
        kind = "measured" if self.task.ceilings.is_measured else "assumed"
        best = sum(row.max_tokens for row in self.rows) / self.bound_s
        self.notebook.figure(
            f"W4 {self.nano.model}, share of the bound",
            100 * self.bound_s / middle.seconds,
            "%",
            f"{best:,.0f} tok/s by {kind} ceilings",
            headline=True,
        )
        _same_draws(self.notebook, middle, simple, "one step at a time")
        return middle

    def _timed(self, runner: DeviceRunner, name: str, options: LoopOptions) -> EngineRun:
        run = run_rows(runner, self.rows, self.task.device, temperature=TEMPERATURE, options=options)
        _check_lengths(self.notebook, run, self.rows, name)
        self.notebook.table(f"W4 {self.nano.model}, {name}", _COLUMNS, [_line(run)])
        self.notebook.figure(
            f"{name}: host",
            run.host_ms,
            "ms/step",
            f"plan, build, commit; device {run.device_ms:.2f} ms, {run.steps:,} steps of {run.mean_batch:.0f} rows, "
            f"{run.preemptions} preemptions, {run.seconds:.2f} s",
            headline=True,
        )
        return run


def _rows(task: Task) -> list[Row]:
    rows = w4_rows()
    assert sum(len(row.prompt) for row in rows) == W4_TOKENS_IN
    assert sum(row.max_tokens for row in rows) == W4_TOKENS_OUT
    return (
        [Row(tuple(t % 512 for t in row.prompt[:20]), row.max_tokens % 5 + 2) for row in rows[:8]]
        if task.is_tiny
        else rows
    )


def _check_lengths(notebook: Notebook, run: EngineRun, rows: list[Row], name: str) -> None:
    tokens_in, tokens_out = sum(len(row.prompt) for row in rows), sum(row.max_tokens for row in rows)
    notebook.check(
        f"{name}: exactly {tokens_in:,} tokens in and {tokens_out:,} out",
        (run.prompt_tokens, run.output_tokens, run.wrong_rows, run.errors) == (tokens_in, tokens_out, 0, 0),
        f"{run.prompt_tokens:,} in, {run.output_tokens:,} out, {run.wrong_rows} rows of a wrong length, "
        f"{run.errors} errors",
    )


def _decode_step(notebook: Notebook, task: Task, runner: DeviceRunner, cost: CostModel) -> None:
    """One decode step on its own, everything prepared: what is left when the engine costs nothing."""
    count, context = (4, 40) if task.is_tiny else (256, CONTEXT)
    for sampling in ("greedy", "plain"):
        step = plan(runner, count, 1, context, sampling)
        seconds = seconds_of(lambda step=step: runner.run(step), "cpu", repeats=2 if task.is_tiny else 15)
        before = runner.device.traffic.snapshot()
        runner.run(step)
        asked = runner.device.traffic.since(before)
        notebook.check(
            f"a {sampling} decode step is one copy there, one graph, one copy back",
            (asked.to_device, asked.replays, asked.to_host) == (1, int(GRAPHS.can_compare), 1),
            str(asked),
        )
        bound = decode_seconds(cost, count, context)
        notebook.figure(
            f"decode step, {count} rows at {context}, {sampling}",
            1e3 * seconds,
            "ms",
            f"the runner alone, host's clock; bound {1e3 * bound:.2f} ms, {100 * bound / seconds:.0f} %",
            headline=sampling == "plain",
        )


def _same_draws(notebook: Notebook, run: EngineRun, other: EngineRun, without: str) -> None:
    same = sum(a == b for a, b in zip(run.tokens, other.tokens, strict=True))
    notebook.figure(f"rows with the same draws, with and {without}", same, f"of {len(run.tokens)}", "near ties differ")


_COLUMNS = [
    *("s", "output tok/s", "total tok/s", "steps", "rows/step", "tokens/step", "host ms", "run ms", "device ms"),
    *("full decode step ms", "pages at most", "preemptions", "recomputed tokens", "steps ahead", "RSS GB"),
]


def _line(run: EngineRun) -> list[object]:
    total = (run.prompt_tokens + run.output_tokens) / run.seconds
    decode = "-" if math.isnan(run.decode_step_ms) else run.decode_step_ms
    return [
        *(run.seconds, run.tokens_per_s, total, run.steps, run.mean_batch, run.tokens_per_step),
        *(run.host_ms, run.run_ms, run.device_ms, decode, f"{run.peak_pages:.1%}", run.preemptions),
        *(run.recomputed_tokens, run.steps_ahead, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20),
    ]
