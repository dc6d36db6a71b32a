"""What a job loses against `nightmill bench`: the same rows as a Parquet file through `nightmill run`, and in a loop.

    python -m bench.run_gap [--workloads W1,W3] [--rounds 3] [--limit ROWS] [-- --num-threads 2 …]

Arguments after `--` go to `nightmill run`. Prompts are the workloads' texts, tokenised again by the run; the loop gets
the ids that the run's tokenizer makes of them. Printed for each round: seconds of the loop, of the run's engine with
work in it, from the engine being ready to the last row, and of the whole command; CPU seconds of feeder and engine.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTimes:
    """Seconds of one `nightmill run`."""

    whole: float  # from exec to exit
    before: float  # until the engine was ready: imports, planning, loading
    fed: float  # from then to the last row
    busy: float  # the engine had work
    steps: float  # in the model, of it
    between: float  # between steps with work left: taking in, reporting
    feeder_cpu: float
    engine_cpu: float
    completion_tokens: int
    num_steps: int


def main() -> None:
    """Of the parent, or of the child that is a `nightmill run` with a stopwatch."""
    if sys.argv[1:2] == ["--child"]:
        _child(Path(sys.argv[2]), sys.argv[3:])
    else:
        compare()


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--workloads", default="W1,W3", show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--limit", type=int)
@click.option("--no-loop", is_flag=True, help="Jobs only.")
@click.argument("arguments", nargs=-1)
def compare(workloads: str, rounds: int, limit: int | None, no_loop: bool, arguments: tuple[str, ...]) -> None:
    """Print a line of JSON for each workload and round, and the medians."""
    from nightmill_worker.model.threads import limit_spinning

    limit_spinning()
    loop = None if no_loop else _Loop()
    for name in workloads.split(","):
        with tempfile.TemporaryDirectory(prefix="nightmill-gap-") as scratch:
            path = Path(scratch) / "prompts.parquet"
            rows = _write_prompts(name, limit, path)
            lines = []
            for number in range(rounds):
                seconds = None if loop is None else loop.run(rows)
                times = _job(path, Path(scratch) / f"out-{number}", arguments)
                lines.append({"workload": name, "loop": seconds, **_rounded(times)})
                click.echo(json.dumps(lines[-1]))
            medians = {
                key: round(statistics.median(line[key] for line in lines), 3)
                for key, value in lines[0].items()
                if isinstance(value, float | int)
            }
            click.echo(json.dumps({"workload": name, "median": medians}))


def _write_prompts(name: str, limit: int | None, path: Path) -> list[tuple[list[int], int]]:
    """The Parquet file, and what its rows are in tokens."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from nightmill.records import ModelSpec
    from nightmill_worker.bench.workload import make_workloads
    from nightmill_worker.feed.tokenizer import Tokenizer
    from nightmill_worker.model.source import resolve_model

    tokenizer = Tokenizer.load(resolve_model(ModelSpec(model="demo"), progress=lambda _: None).directory)
    made = make_workloads(lambda text: tokenizer.encode(text, add_special_tokens=False), tokenizer.decode)
    rows = made[name].rows[:limit]
    texts = [tokenizer.decode(row.prompt_ids) for row in rows]
    sampling = [json.dumps({"max_tokens": row.max_tokens, "ignore_eos": True}) for row in rows]
    pq.write_table(pa.table({"prompt": texts, "sampling_params": sampling}), path)
    return list(zip(tokenizer.encode_batch(texts), [row.max_tokens for row in rows], strict=True))


def _job(path: Path, output: Path, arguments: tuple[str, ...]) -> JobTimes:
    report = output.with_suffix(".json")
    command = [sys.executable, "-m", "bench.run_gap", "--child", str(report)]
    command += ["run", str(path), "-o", str(output), "--model", "demo", "--no-chat", *arguments]
    with tempfile.TemporaryDirectory(prefix="nightmill-home-") as home:
        environ = {**os.environ, "NIGHTMILL_HOME": home}
        started = time.perf_counter()
        subprocess.run(command, check=True, env=environ, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        whole = time.perf_counter() - started
    return JobTimes(whole=whole, **json.loads(report.read_text()))


def _rounded(times: JobTimes) -> dict[str, Any]:
    return {name: round(getattr(times, name), 3) for name in JobTimes.__slots__}


def _child(report: Path, arguments: list[str]) -> None:
    """`nightmill`, noting when its engine was ready and what it did."""
    from nightmill.cli.main import main as nightmill
    from nightmill_worker.run_meter import RunMeter

    started = _process_started_at()
    begin, end = RunMeter.begin, RunMeter.end
    seen: dict[str, Any] = {}

    def noted_begin(meter: RunMeter) -> None:
        seen["ready"] = time.time()
        begin(meter)

    def noted_end(meter: RunMeter, crew: Any, supervisor: Any) -> None:
        end(meter, crew, supervisor)
        stats = supervisor.stats()[-1]
        fed = time.time() - seen["ready"]
        seen["times"] = {
            "before": seen["ready"] - started,
            "fed": fed,
            "busy": (stats.wall_ns - stats.idle_ns) * 1e-9,
            "steps": stats.run_s,
            "between": stats.wait_s,
            "completion_tokens": stats.generated_tokens,
            "num_steps": stats.steps,
        }

    RunMeter.begin, RunMeter.end = noted_begin, noted_end  # type: ignore[method-assign]
    sys.argv = ["nightmill", *arguments]
    code: Any = 0
    try:
        nightmill()
    except SystemExit as leaving:
        code = leaving.code
    own, engine = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    times = seen["times"] | {
        "feeder_cpu": own.ru_utime + own.ru_stime,
        "engine_cpu": engine.ru_utime + engine.ru_stime,
    }
    report.write_text(json.dumps(times))
    sys.exit(code)


def _process_started_at() -> float:
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")


class _Loop:
    """The engine and the model in this process, as in `nightmill bench`."""

    def __init__(self) -> None:
        from nightmill.records import EngineOptions, ModelSpec
        from nightmill_worker.model.runner import ModelRunnerConfig
        from nightmill_worker.model.source import resolve_model

        spec = ModelSpec(model="demo")
        directory = resolve_model(spec, progress=lambda _: None).directory
        self._runner = ModelRunnerConfig(model_dir=directory, spec=spec, options=EngineOptions()).build()

    def run(self, rows: list[tuple[list[int], int]]) -> float:
        from nightmill.sampling import SamplingParams
        from nightmill.states import Tier
        from nightmill_worker.engine.loop import EngineLoop
        from nightmill_worker.engine.options import LoopOptions
        from nightmill_worker.engine.request import Request

        max_model_len = self._runner.max_model_len  # type: ignore[union-attr]
        options = LoopOptions(max_num_seqs=64, max_num_batched_tokens=512, max_model_len=max_model_len)
        loop = EngineLoop(self._runner, options)
        started = time.perf_counter()
        for i, (ids, max_tokens) in enumerate(rows):
            sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
            loop.add(
                Request(request_id=i, job_id="gap", tier=Tier.NORMAL, prompt=tuple(ids), sampling=sampling, seed=i)
            )
        while loop.has_work:
            loop.step()
        return round(time.perf_counter() - started, 3)


if __name__ == "__main__":
    main()
