"""Host time per engine step, without a model: `python bench/host_step.py [--waiting 1000,10000] [--running 256]`.

Measured is what the engine does beside the runner: deciding and packing a step, committing its tokens. Two steady
states, each at several queue lengths:

    decode   nobody joins or leaves
    mixed    rows of varied lengths end and others take their places, into a page pool that is full: prefixes are
             evicted, the admission gate predicts; each row that ends is replaced by a new one at the end of the queue

Taking in a new row happens between steps: it is shown apart (`add_us` for each, measured in the steady state) and as
what it adds to a mean step (`add_ms`). `cpu_*` is this process's CPU time of a whole step, stand-in for the model
included, which a busy machine does not change much; the others are wall time.
"""

import cProfile
import gc
import json
import pstats
import resource
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np

from nightmill.sampling import SamplingParams
from nightmill.states import Tier
from nightmill_worker.engine.loop import EngineLoop
from nightmill_worker.engine.options import LoopOptions
from nightmill_worker.engine.request import Request
from nightmill_worker.engine.roofline import Ceilings, ModelCost, Roofline
from nightmill_worker.engine.step import PoolShape, StepOutput, StepPlan
from nightmill_worker.engine_process import tune_gc

VOCAB = 32_000
PAGE_SIZE = 16
MIXED_PAGES = 6_400  # about what 256 rows of the mixed state hold, with no room for each to reach its longest form
DECODE_PAGES = 1 << 17
GROUPS = 512
WARM_STEPS = 600


class NoModel:
    """A Runner that answers at once."""

    def __init__(self, num_pages: int) -> None:
        self.pool = PoolShape(num_pages=num_pages, page_size=PAGE_SIZE, bytes_per_token=1)
        self.vocab_size = VOCAB
        # As a model's runner has one: its bound is taken of every step, and is part of what is measured here.
        cost = ModelCost(token_flops=1, logit_flops=1, attention_flops=1, weight_bytes=1, kv_bytes=1)
        self.roofline = Roofline(cost, Ceilings(flops=1, bytes_per_s=1))
        self._rng = np.random.default_rng(0)

    def run(self, plan: StepPlan) -> StepOutput:
        return StepOutput(tokens=self._rng.integers(10, VOCAB, len(plan.sample.sequence), dtype=np.int32))

    def close(self) -> None:
        pass


class NoDevice(NoModel):
    """The same for steps that overlap: what is submitted has been done."""

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages)
        self._outputs: deque[StepOutput] = deque()

    def submit(self, plan: StepPlan) -> None:
        self._outputs.append(self.run(plan))

    def collect(self) -> StepOutput:
        return self._outputs.popleft()


class Rows:
    """New requests: half of them with one of 512 prefixes of 128 tokens, tiers and jobs mixed."""

    def __init__(self, *, decode_only: bool) -> None:
        self._decode_only = decode_only
        self._rng = np.random.default_rng(1)
        self._prefixes = [tuple(self._rng.integers(0, VOCAB, 128).tolist()) for _ in range(GROUPS)]
        self._next_id = 0

    def make(self) -> Request:
        i, rng = self._next_id, self._rng
        self._next_id += 1
        own = tuple(rng.integers(0, VOCAB, int(rng.integers(16, 256))).tolist())
        prefix = self._prefixes[int(rng.integers(GROUPS))] if i % 2 else ()
        max_tokens = 7000 if self._decode_only else int(rng.integers(16, 512))
        return Request(
            request_id=i,
            job_id=f"job-{i % 4}",
            tier=list(Tier)[i % 3],
            prompt=prefix + own,
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.7, top_p=0.95),
            seed=i,
            eos_token_ids=(0, 1),
        )


@dataclass
class Samples:
    """Of each step, in ms."""

    host: list[float]
    cpu: list[float]
    add_s: float = 0.0
    num_added: int = 0


@click.command()
@click.option("--running", default=256, show_default=True)
@click.option("--waiting", default="1000,10000,100000", show_default=True, help="Queue lengths, with commas.")
@click.option("--steps", default=2000, show_default=True)
@click.option("--state", type=click.Choice(["decode", "mixed", "both"]), default="both", show_default=True)
@click.option("--pool", "num_pages", type=int, help="Pages in the mixed state.  [default: 25 a row, which is too few]")
@click.option("--ahead", is_flag=True, help="Steps overlap (async scheduling).")
@click.option("--profile", is_flag=True, help="Print where the time goes.")
def main(running: int, waiting: str, steps: int, state: str, num_pages: int | None, ahead: bool, profile: bool) -> None:
    """Print a line of JSON for each state and queue length."""
    for name in ("decode", "mixed") if state == "both" else (state,):
        for num_waiting in map(int, waiting.split(",")):
            click.echo(json.dumps(_measure(name, running, num_waiting, steps, num_pages, ahead, profile)))


def _measure(
    state: str, running: int, waiting: int, steps: int, num_pages: int | None, ahead: bool, profile: bool
) -> dict[str, object]:
    is_mixed = state == "mixed"
    mixed_pages = num_pages or MIXED_PAGES * running // 256
    options = LoopOptions(max_num_seqs=running, max_num_batched_tokens=8192, max_model_len=8192, async_scheduling=ahead)
    model = NoDevice if ahead else NoModel
    loop = EngineLoop(model(mixed_pages if is_mixed else DECODE_PAGES), options)
    rows = Rows(decode_only=not is_mixed)
    rss = _rss_bytes()
    for _ in range(running + waiting):
        loop.add(rows.make())
    rss = _rss_bytes() - rss
    while loop.table.num_used < running * (0.9 if is_mixed else 1):
        loop.step()
    tune_gc()
    _run(loop, rows, WARM_STEPS if is_mixed else 10, is_mixed, None)
    before = loop.stats()
    profiler = cProfile.Profile() if profile else None
    samples = _run(loop, rows, steps, is_mixed, profiler)
    after = loop.stats()
    if profiler is not None:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(30)
    return {
        "state": state,
        "running": round((after.mean_batch * after.steps - before.mean_batch * before.steps) / steps, 1),
        "waiting": after.waiting,
        "ended_per_step": round((after.finished - before.finished) / steps, 2),
        "evicted_per_step": round((after.evictions - before.evictions) / steps, 1),
        "ahead": round((after.steps_ahead - before.steps_ahead) / steps, 3),
        "preemptions": after.preemptions - before.preemptions,
        "mean_ms": round(float(np.mean(samples.host)), 3),
        "p50_ms": round(float(np.percentile(samples.host, 50)), 3),
        "p99_ms": round(float(np.percentile(samples.host, 99)), 3),
        "cpu_mean_ms": round(float(np.mean(samples.cpu)), 3),
        "cpu_p99_ms": round(float(np.percentile(samples.cpu, 99)), 3),
        "cpu_max_ms": round(float(np.max(samples.cpu)), 3),
        "plan_ms": round(1e3 * (after.plan_s - before.plan_s) / steps, 3),
        "build_ms": round(1e3 * (after.build_s - before.build_s) / steps, 3),
        "commit_ms": round(1e3 * (after.commit_s - before.commit_s) / steps, 3),
        "add_us": round(1e6 * samples.add_s / max(1, samples.num_added), 1),
        "add_ms": round(1e3 * samples.add_s / steps, 3),
        "bytes_per_waiting": round(rss / (running + waiting)),
    }


def _run(loop: EngineLoop, rows: Rows, steps: int, is_mixed: bool, profiler: cProfile.Profile | None) -> Samples:
    samples, counters = Samples([], []), loop.counters
    for _ in range(steps):
        host, cpu = counters.plan_s + counters.build_s + counters.commit_s, time.thread_time()
        if profiler is not None:
            profiler.enable()
        ended = loop.step()
        if profiler is not None:
            profiler.disable()
        samples.cpu.append(1e3 * (time.thread_time() - cpu))
        samples.host.append(1e3 * (counters.plan_s + counters.build_s + counters.commit_s - host))
        if is_mixed:
            fresh = [rows.make() for _ in ended]
            started = time.thread_time()
            for request in fresh:
                loop.add(request)
            samples.add_s += time.thread_time() - started
            samples.num_added += len(fresh)
    return samples


def _rss_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    main()
