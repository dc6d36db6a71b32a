"""How much of the time a CPU engine spends outside kernels and matrix products, and where the rest goes.

    python bench/host_share.py [--runs decode,W1,W2,W3] [--threads N] [--max-num-seqs 64] [--limit ROWS] [--json FILE]

`decode` is a batch of 64 rows around context 500, of which only the steps count in which every row decodes; W1–W3 are
the whole runs of `nightmill bench`. Engine and model are those of `nightmill run`, in this process: a step is measured
from deciding it to its tokens being committed.
"""

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click
import numpy as np

from bench.part_timer import Part, PartTimer, Seconds
from nightmill.records import EngineOptions, ModelSpec
from nightmill.sampling import SamplingParams
from nightmill.states import Tier
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


def measure(loop: EngineLoop, timer: PartTimer, share: Share, *, only_decodes: bool) -> None:
    """Step until the engine is empty, counting every step, or those in which all rows decode."""
    counters = loop.counters
    while loop.has_work:
        before = (counters.plan_s, counters.build_s, counters.commit_s, counters.computed_tokens)
        drawn, calls, parts, started = counters.generated_tokens, timer.num_calls, timer.read(), timer.clock()
        loop.step()
        wall, computed = timer.clock() - started, counters.computed_tokens - before[3]
        if only_decodes and (computed != BATCH or counters.generated_tokens - drawn != BATCH):
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
    """Markdown: seconds, share and milliseconds a step of each part."""
    rows = {part.value: seconds for part, seconds in share.parts.items()}
    rows |= {
        "host: deciding": share.plan_s,
        "host: packing": share.build_s,
        "host: committing": share.commit_s,
        "host: in the model": share.model_host_s,
        "host, all": share.host_s,
        "all": share.wall_s,
    }
    lines = ["| part | s | share | ms a step |", "|---|---:|---:|---:|"]
    lines += [
        f"| {name} | {s:.3f} | {s / share.wall_s:.1%} | {1e3 * s / share.steps:.3f} |" for name, s in rows.items()
    ]
    lines.append("")
    calls = share.calls / share.steps
    lines.append(
        f"{share.steps} steps, {share.tokens:,} tokens computed, {share.drawn:,} drawn. {calls:.0f} timed calls a step,"
        f" which took {1e3 * overhead_s * calls:.3f} ms of the host's."
    )
    return "\n".join(lines)


@click.command()
@click.option("--runs", default="decode,W1,W2,W3", show_default=True)
@click.option("--threads", type=int, help="CPU threads; default: as nightmill run.")
@click.option("--max-num-seqs", default=64, show_default=True)
@click.option("--max-num-batched-tokens", default=512, show_default=True)
@click.option("--limit", type=int, help="First rows of each workload only.")
@click.option("--model", default="demo", show_default=True)
@click.option("--cpu-clock", is_flag=True, help="CPU time of the engine's thread: for a busy machine.")
@click.option("--json", "json_path", type=Path)
def main(
    runs: str,
    threads: int | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    limit: int | None,
    model: str,
    cpu_clock: bool,
    json_path: Path | None,
) -> None:
    """Print a table for each run."""
    from nightmill_worker.model.threads import limit_spinning

    limit_spinning()
    from nightmill_worker.model.runner import ModelRunnerConfig
    from nightmill_worker.model.source import resolve_model

    timer = PartTimer(time.thread_time if cpu_clock else time.perf_counter)
    timer.install()
    spec = ModelSpec(model=model)
    directory = resolve_model(spec, progress=lambda line: click.echo(line, err=True)).directory
    engine = EngineOptions(num_threads=threads, max_num_seqs=max_num_seqs)
    runner = ModelRunnerConfig(model_dir=directory, spec=spec, options=engine).build()
    options = LoopOptions(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=runner.max_model_len,
    )
    names = runs.split(",")
    requests = workload_requests([name for name in names if name != "decode"], directory, limit)
    requests["decode"] = decode_requests(runner.vocab_size)
    overhead_s = timer.overhead_s()
    _warm_up(EngineLoop(runner, options), requests["decode"][:4])
    shares = []
    for name in names:
        loop, share = EngineLoop(runner, options), Share(name)
        for request in requests[name]:
            loop.add(request)
        measure(loop, timer, share, only_decodes=name == "decode")
        shares.append(share)
        click.echo(f"\n## {name}\n\n{table(share, overhead_s)}")
    if json_path is not None:
        json_path.write_text(json.dumps([asdict(share) for share in shares], indent=1) + "\n")


def _warm_up(loop: EngineLoop, requests: list[Request]) -> None:
    for request in requests:
        loop.add(request)
    while loop.has_work:
        loop.step()


if __name__ == "__main__":
    main()
