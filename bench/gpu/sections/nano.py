"""W4, the nano bench: 256 rows with dummy weights; tokens per second and the share of what the device could do."""

import math
from dataclasses import dataclass

from bench.gpu.bound import bound_seconds, decode_seconds
from bench.gpu.clock import seconds_of
from bench.gpu.engine_run import EngineRun, build, loop_options, opened, run_rows
from bench.gpu.notebook import Notebook
from bench.gpu.section import Task
from bench.gpu.switches import GRAPHS, RUN_AHEAD, Switch
from bench.gpu.workloads import W4_TOKENS_IN, W4_TOKENS_OUT, Row, staggered, w4_rows
from bench.model_step import plan
from nightmill_worker.engine.step import Runner
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
    bound = bound_seconds(cost, rows)
    with opened(build("tiny" if task.is_tiny else nano.model, task.device)) as runner:
        notebook.say(f"pool: {runner.pool.num_pages:,} pages of {runner.pool.page_size} tokens")
        warm = run_rows(runner, staggered(rows, 4 if task.is_tiny else 48), task.device, temperature=TEMPERATURE)
        notebook.say(f"warm after {warm.seconds:.1f} s")
        _decode_step(notebook, task, runner, cost)
        best = _default_runs(notebook, task, nano, runner, rows, bound)
        _one_at_a_time(notebook, task, runner, rows, best)
    _variant_without(notebook, task, nano, rows, best, GRAPHS)


def _rows(task: Task) -> list[Row]:
    rows = w4_rows()
    assert sum(len(row.prompt) for row in rows) == W4_TOKENS_IN
    assert sum(row.max_tokens for row in rows) == W4_TOKENS_OUT
    return (
        [Row(tuple(t % 512 for t in row.prompt[:20]), row.max_tokens % 5 + 2) for row in rows[:8]]
        if task.is_tiny
        else rows
    )


def _default_runs(
    notebook: Notebook, task: Task, nano: Nano, runner: Runner, rows: list[Row], bound: float
) -> EngineRun:
    runs: list[EngineRun] = []
    for turn in range(1 if task.is_tiny else nano.runs):
        if runs and not notebook.has_time_for(f"run {turn + 1}", 1.3 * runs[-1].seconds):
            break
        runs.append(run_rows(runner, rows, task.device, temperature=TEMPERATURE))
        _check_lengths(notebook, runs[-1], rows, f"run {turn + 1}")
        notebook.say(f"run {turn + 1}: {runs[-1].tokens_per_s:,.0f} tok/s in {runs[-1].seconds:.2f} s")
    middle = sorted(runs, key=lambda run: run.seconds)[len(runs) // 2 if len(runs) % 2 else len(runs) // 2 - 1]
    rates = ", ".join(f"{run.tokens_per_s:,.0f}" for run in runs)
    note = f"runs: {rates}; target {nano.target:,.0f}"
    notebook.figure(f"W4 {nano.model}", middle.tokens_per_s, "output tok/s", note, headline=True)
    kind = "measured" if task.ceilings.is_measured else "assumed"
    notebook.figure(
        f"W4 {nano.model}, share of the bound",
        100 * bound / middle.seconds,
        "%",
        f"bound {sum(r.max_tokens for r in rows) / bound:,.0f} tok/s by {kind} ceilings",
        headline=True,
    )
    notebook.table(f"W4 {nano.model}", _COLUMNS, [_line("everything on", run) for run in runs])
    notebook.figure("steps", middle.steps, "", f"{middle.mean_batch:.1f} rows a step, {middle.preemptions} preemptions")
    notebook.figure("host", middle.host_ms, "ms/step", "plan, build, commit", headline=True)
    notebook.figure("device", middle.device_ms, "ms/step", "as the runner says", headline=True)
    return middle


def _check_lengths(notebook: Notebook, run: EngineRun, rows: list[Row], name: str) -> None:
    tokens_in, tokens_out = sum(len(row.prompt) for row in rows), sum(row.max_tokens for row in rows)
    notebook.check(
        f"{name}: exactly {tokens_in:,} tokens in and {tokens_out:,} out",
        (run.prompt_tokens, run.output_tokens, run.wrong_rows, run.errors) == (tokens_in, tokens_out, 0, 0),
        f"{run.prompt_tokens:,} in, {run.output_tokens:,} out, {run.wrong_rows} rows of a wrong length, "
        f"{run.errors} errors",
    )


def _decode_step(notebook: Notebook, task: Task, runner: Runner, cost: CostModel) -> None:
    """One decode step on its own, everything prepared: what is left when the engine costs nothing."""
    count, context = (4, 40) if task.is_tiny else (256, CONTEXT)
    for sampling in ("greedy", "plain"):
        step = plan(runner, count, 1, context, sampling)
        seconds = seconds_of(lambda step=step: runner.run(step), "cpu", repeats=2 if task.is_tiny else 15)
        bound = decode_seconds(cost, count, context)
        notebook.figure(
            f"decode step, {count} rows at {context}, {sampling}",
            1e3 * seconds,
            "ms",
            f"the runner alone, host's clock; bound {1e3 * bound:.2f} ms, {100 * bound / seconds:.0f} %",
            headline=sampling == "plain",
        )


def _one_at_a_time(notebook: Notebook, task: Task, runner: Runner, rows: list[Row], best: EngineRun) -> None:
    """What a step in flight beside the one being planned is worth."""
    if RUN_AHEAD is None:
        notebook.note("no switch for steps in flight in this engine")
        return
    if not notebook.has_time_for(f"W4 {RUN_AHEAD.without}", 1.6 * best.seconds):
        return
    run = run_rows(runner, rows, task.device, temperature=TEMPERATURE, options=loop_options(**RUN_AHEAD.off))
    _report_variant(notebook, run, rows, best, RUN_AHEAD)


def _variant_without(
    notebook: Notebook, task: Task, nano: Nano, rows: list[Row], best: EngineRun, switch: Switch | None
) -> None:
    if switch is None:
        notebook.note("no switch for CUDA graphs in this runner")
        return
    if not notebook.has_time_for(f"W4 {switch.without}", 15 + 3 * best.seconds):
        return
    with opened(build("tiny" if task.is_tiny else nano.model, task.device, **switch.off)) as runner:
        run_rows(runner, staggered(rows, 4 if task.is_tiny else 48), task.device, temperature=TEMPERATURE)
        _report_variant(notebook, run_rows(runner, rows, task.device, temperature=TEMPERATURE), rows, best, switch)


def _report_variant(notebook: Notebook, run: EngineRun, rows: list[Row], best: EngineRun, switch: Switch) -> None:
    _check_lengths(notebook, run, rows, switch.without)
    notebook.table(f"W4 {switch.without}", _COLUMNS, [_line(switch.without, run)])
    ratio = best.tokens_per_s / run.tokens_per_s
    note = f"with: {best.tokens_per_s:,.0f}, {ratio:.2f} times as much"
    notebook.figure(f"W4 {switch.without}", run.tokens_per_s, "output tok/s", note, headline=True)
    same = sum(a == b for a, b in zip(run.tokens, best.tokens, strict=True))
    notebook.figure(f"rows with the same draws {switch.without}", same, f"of {len(rows)}", "bf16 near ties differ")


_COLUMNS = [
    *("run", "s", "output tok/s", "total tok/s", "steps", "rows/step", "host ms", "run ms", "device ms"),
    *("full decode step ms", "preemptions"),
]


def _line(name: str, run: EngineRun) -> list[object]:
    total = (run.prompt_tokens + run.output_tokens) / run.seconds
    decode = "-" if math.isnan(run.decode_step_ms) else run.decode_step_ms
    return [
        *(name, run.seconds, run.tokens_per_s, total, run.steps, run.mean_batch, run.host_ms, run.run_ms),
        *(run.device_ms, decode, run.preemptions),
    ]
