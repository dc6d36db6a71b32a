"""How much of the time a CPU engine spends outside kernels and matrix products, and where the rest goes.

    python -m bench.host_share [--runs decode,W1,W2,W3] [--threads N] [--limit ROWS] [--write DIR] [--json FILE]

`decode` is a batch of 64 rows around context 500, of which only the steps count in which every row decodes; W1–W3 are
the whole runs of `nightmill bench`. Engine and model are those of `nightmill run`, in this process: a step is measured
from deciding it to its tokens being committed. Each run is done twice: seconds are of the first, the second tells how
those of recorded steps divide (see part_timer.py). The bound is each step's, part by part: weights or KV over the
bandwidth, or FLOPs over the rate of a large product, whichever is more, both measured when the model was loaded.
"""

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click
import numpy as np

from bench.part_bounds import PartBounds
from bench.part_timer import Part, PartTimer, Seconds
from nightmill.records import EngineOptions, ModelSpec
from nightmill.sampling import SamplingParams
from nightmill.states import Tier
from nightmill_worker.cores import CorePlan
from nightmill_worker.engine.loop import EngineLoop
from nightmill_worker.engine.options import LoopOptions
from nightmill_worker.engine.request import Request

BATCH, PROMPT, DECODES = 64, 440, 120  # the last row enters in step 65 or so: from there on the mean context is 500


@dataclass(slots=True)
class Share:
    """Seconds of a run, or of the steps of it that count."""

    name: str
    steps: int = 0
    wall_s: float = 0.0
    plan_s: float = 0.0  # deciding
    build_s: float = 0.0  # packing
    commit_s: float = 0.0
    tokens: int = 0  # computed
    drawn: int = 0
    calls: int = 0
    parts: Seconds = field(default_factory=lambda: dict.fromkeys(Part, 0.0))
    bounds: Seconds = field(default_factory=dict)

    @property
    def host_s(self) -> float:
        """Everything outside kernels and matrix products."""
        return self.wall_s - sum(self.parts.values())

    @property
    def model_host_s(self) -> float:
        """Of it, what is spent inside the model's forward pass and draw."""
        return self.host_s - self.plan_s - self.build_s - self.commit_s

    @property
    def share(self) -> float:
        """The host's part of the wall time."""
        return self.host_s / self.wall_s


def divide(share: Share, recorded: Seconds) -> None:
    """Give the parts their seconds of recorded steps, by how a run divided that took those call by call."""
    whole, seconds = sum(recorded.values()), share.parts.pop(Part.RECORDED)
    for part in share.parts:
        share.parts[part] += seconds * recorded[part] / whole if whole else 0.0


def measure(loop: EngineLoop, timer: PartTimer, bounds: PartBounds, share: Share, *, only_decodes: bool) -> None:
    """Step until the engine is empty, counting every step, or those in which all rows decode."""
    counters = loop.counters
    while loop.has_work:
        before = (counters.plan_s, counters.build_s, counters.commit_s, counters.computed_tokens)
        bound = bounds.read()
        recorded = dict(timer.recorded)
        drawn, calls, parts, started = counters.generated_tokens, timer.num_calls, timer.read(), timer.clock()
        loop.step()
        wall, computed = timer.clock() - started, counters.computed_tokens - before[3]
        if only_decodes and (computed != BATCH or counters.generated_tokens - drawn != BATCH):
            timer.recorded = recorded  # as if it had not been
            continue
        share.steps += 1
        share.wall_s += wall
        share.plan_s += counters.plan_s - before[0]
        share.build_s += counters.build_s - before[1]
        share.commit_s += counters.commit_s - before[2]
        share.tokens += computed
        share.drawn += counters.generated_tokens - drawn
        share.calls += timer.num_calls - calls
        for part, seconds in timer.read().items():
            share.parts[part] += seconds - parts[part]
        for part, seconds in bounds.read().items():
            share.bounds[part] = share.bounds.get(part, 0.0) + seconds - bound[part]


def decode_requests(vocab_size: int) -> list[Request]:
    """Rows that share nothing, all of one length."""
    rng = np.random.default_rng(0)
    return [_request(i, "decode", tuple(rng.integers(0, vocab_size, PROMPT).tolist()), DECODES) for i in range(BATCH)]


def workload_requests(names: Iterable[str], directory: Path, limit: int | None) -> dict[str, list[Request]]:
    """The rows of `nightmill bench`."""
    from nightmill_worker.bench.workload import make_workloads
    from nightmill_worker.feed.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(directory)
    made = make_workloads(lambda text: tokenizer.encode(text, add_special_tokens=False), tokenizer.decode)
    return {
        name: [_request(i, name, row.prompt_ids, row.max_tokens) for i, row in enumerate(made[name].rows[:limit])]
        for name in names
    }


def _request(number: int, name: str, prompt: tuple[int, ...], max_tokens: int) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(request_id=number, job_id=name, tier=Tier.NORMAL, prompt=prompt, sampling=sampling, seed=number)


def table(share: Share, overhead_s: float) -> str:
    """Markdown: seconds, share, milliseconds a step and the bound of each part."""
    rows = {part.value: seconds for part, seconds in share.parts.items() if seconds}
    rows |= {
        "host: deciding": share.plan_s,
        "host: packing": share.build_s,
        "host: committing": share.commit_s,
        "host: in the model": share.model_host_s,
        "host, all": share.host_s,
        "all": share.wall_s,
    }
    bounds = {**share.bounds, "all": sum(share.bounds.values())}
    lines = ["| part | s | share | ms a step | bound, s | times the bound |", "|---|---:|---:|---:|---:|---:|"]
    for name, seconds in rows.items():
        line = f"| {name} | {seconds:.3f} | {seconds / share.wall_s:.1%} | {1e3 * seconds / share.steps:.3f} |"
        bound = bounds.get(name)
        lines.append(line + (f" {bound:.3f} | {seconds / bound:.2f} |" if bound else " | |"))
    calls = share.calls / share.steps
    lines += [
        "",
        f"{share.steps} steps, {share.tokens:,} tokens computed, {share.drawn:,} drawn. {calls:.0f} timed calls a step,"
        f" which took {1e3 * overhead_s * calls:.3f} ms of the host's.",
    ]
    return "\n".join(lines)


def heading(name: str, bounds: PartBounds, plan: CorePlan) -> str:
    """What was measured, on what."""
    from nightmill_worker.bench.machine import this_machine

    machine, ceilings = this_machine(), bounds.ceilings
    return (
        f"# Where {name} spends its time\n\n"
        f"`python -m bench.host_share --runs {name}` at {machine.commit}: {machine.cpu}, "
        f"{str(plan).partition(';')[0]}, torch {machine.versions['torch']}; a large product "
        f"{ceilings.flops / 1e9:,.0f} GFLOP/s, memory {ceilings.bytes_per_s / 1e9:.1f} GB/s.\n\n"
    )


@click.command()
@click.option("--runs", default="decode,W1,W2,W3", show_default=True)
@click.option("--threads", type=int, help="CPU threads; default: as nightmill run.")
@click.option("--max-num-seqs", default=64, show_default=True)
@click.option("--max-num-batched-tokens", default=512, show_default=True)
@click.option("--limit", type=int, help="First rows of each workload only.")
@click.option("--model", default="demo", show_default=True)
@click.option("--cpu-clock", is_flag=True, help="CPU time of the engine's thread: for a busy machine.")
@click.option("--write", "directory", type=Path, help="A table for each run in this folder.")
@click.option("--json", "json_path", type=Path)
def main(
    runs: str,
    threads: int | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    limit: int | None,
    model: str,
    cpu_clock: bool,
    directory: Path | None,
    json_path: Path | None,
) -> None:
    """Print a table for each run."""
    from nightmill_worker.cores import claim_cores, find_cores, plan_cores
    from nightmill_worker.model.threads import limit_spinning

    cores = find_cores()
    plan = claim_cores(plan_cores(cores, num_threads=threads), cores)
    plan.pin()
    limit_spinning()
    from nightmill_worker.model.config_reader import read_config
    from nightmill_worker.model.runner import ModelRunner, ModelRunnerConfig
    from nightmill_worker.model.source import resolve_model

    timer = PartTimer(time.thread_time if cpu_clock else time.perf_counter)
    timer.install()
    spec = ModelSpec(model=model)
    model_dir = resolve_model(spec, progress=lambda line: click.echo(line, err=True)).directory
    engine = EngineOptions(num_threads=plan.engine_threads, max_num_seqs=max_num_seqs)
    runner = ModelRunnerConfig(model_dir=model_dir, spec=spec, options=engine).build()
    assert isinstance(runner, ModelRunner), "this measures CPUs"
    assert runner.roofline is not None
    bounds = PartBounds(runner.roofline, read_config(model_dir), runner.pool.page_size)
    bounds.watch(runner)
    options = LoopOptions(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=runner.max_model_len,
    )
    names = runs.split(",")
    requests = workload_requests([name for name in names if name != "decode"], model_dir, limit)
    requests["decode"] = decode_requests(runner.vocab_size)
    overhead_s = timer.overhead_s()
    _warm_up(EngineLoop(runner, options), requests["decode"][:4])
    shares = []
    for name in names:
        share = Share(name)
        for timer.split in (False, True):
            loop, counted = EngineLoop(runner, options), share if not timer.split else Share(name)
            timer.recorded = dict.fromkeys(Part, 0.0)
            for request in requests[name]:
                loop.add(request)
            measure(loop, timer, bounds, counted, only_decodes=name == "decode")
        divide(share, timer.recorded)
        shares.append(share)
        text = table(share, overhead_s)
        click.echo(f"\n## {name}\n\n{text}")
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / f"{name}.md").write_text(heading(name, bounds, plan) + text + "\n")
    if json_path is not None:
        json_path.write_text(json.dumps([asdict(share) for share in shares], indent=1) + "\n")


def _warm_up(loop: EngineLoop, requests: list[Request]) -> None:
    for request in requests:
        loop.add(request)
    while loop.has_work:
        loop.step()


if __name__ == "__main__":
    main()
