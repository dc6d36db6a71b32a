"""Host time per engine step, without a model: `python bench/host_step.py [--waiting 100000] [--running 256]`.

What is measured is deciding and packing a step, and committing its tokens: everything but the runner. Prompts and
lengths vary, so that rows end and others join all the time, as in a real job. `cpu_*` is this process's CPU time of
the whole step (with the stand-in for the model), which a busy machine does not change much.
"""

import cProfile
import gc
import json
import pstats
import time

import click
import numpy as np

from nightmill.sampling import SamplingParams
from nightmill.states import Tier
from nightmill_worker.engine.loop import EngineLoop
from nightmill_worker.engine.options import LoopOptions
from nightmill_worker.engine.request import Request
from nightmill_worker.engine.step import PoolShape, StepOutput, StepPlan

VOCAB = 32_000
PREFIX = tuple(range(128))


class NoModel:
    """A Runner that answers at once."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.pool = PoolShape(num_pages=num_pages, page_size=page_size, bytes_per_token=1)
        self.vocab_size = VOCAB
        self._rng = np.random.default_rng(0)

    def run(self, plan: StepPlan) -> StepOutput:
        return StepOutput(tokens=self._rng.integers(10, VOCAB, len(plan.sample.sequence), dtype=np.int32))

    def close(self) -> None:
        pass


@click.command()
@click.option("--running", default=256, show_default=True)
@click.option("--waiting", default=100_000, show_default=True)
@click.option("--steps", default=1000, show_default=True)
@click.option("--page-size", default=16, show_default=True)
@click.option("--pages", default=65_536, show_default=True, help="Pool size.")
@click.option("--long", is_flag=True, help="Answers of 4,000 tokens: decode only, nobody joins or leaves.")
@click.option("--no-gc", is_flag=True, help="Without Python's cyclic garbage collector.")
@click.option("--profile", is_flag=True, help="Print where the time goes.")
def main(
    running: int, waiting: int, steps: int, page_size: int, pages: int, long: bool, no_gc: bool, profile: bool
) -> None:
    """Print mean, median and p99 milliseconds of host time per step as JSON."""
    options = LoopOptions(max_num_seqs=running, max_num_batched_tokens=8192, max_model_len=8192)
    loop = EngineLoop(NoModel(pages, page_size), options)
    rng = np.random.default_rng(1)
    added = time.perf_counter()
    for i in range(running + waiting):
        loop.add(_request(i, rng, long))
    added = time.perf_counter() - added
    while loop.table.num_used < running:
        loop.step()
    if no_gc:
        gc.disable()
    profiler = cProfile.Profile()
    host_ms, cpu_ms, before = [], [], loop.stats()
    for _ in range(steps):
        spent, cpu = loop.counters.plan_s + loop.counters.commit_s, time.process_time()
        if profile:
            profiler.enable()
        loop.step()
        cpu_ms.append(1e3 * (time.process_time() - cpu))
        profiler.disable()
        host_ms.append(1e3 * (loop.counters.plan_s + loop.counters.commit_s - spent))
    after = loop.stats()
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(22)
    result = {
        "running": round((after.mean_batch * after.steps - before.mean_batch * before.steps) / steps, 1),
        "waiting": after.waiting,
        "steps": steps,
        "ended_per_step": round((after.finished - before.finished) / steps, 2),
        "preemptions": after.preemptions,
        "evictions": after.evictions,
        "add_us": round(1e6 * added / (running + waiting), 1),
        "plan_ms": round(1e3 * (after.plan_s - before.plan_s) / steps, 3),
        "commit_ms": round(1e3 * (after.commit_s - before.commit_s) / steps, 3),
        "mean_ms": round(float(np.mean(host_ms)), 3),
        "p50_ms": round(float(np.percentile(host_ms, 50)), 3),
        "p99_ms": round(float(np.percentile(host_ms, 99)), 3),
        "cpu_mean_ms": round(float(np.mean(cpu_ms)), 3),
        "cpu_p99_ms": round(float(np.percentile(cpu_ms, 99)), 3),
        "cpu_max_ms": round(float(np.max(cpu_ms)), 3),
    }
    click.echo(json.dumps(result))


def _request(i: int, rng: np.random.Generator, long: bool) -> Request:
    own = tuple(rng.integers(0, VOCAB, int(rng.integers(16, 256))).tolist())
    max_tokens = 4000 if long else int(rng.integers(16, 512))
    return Request(
        request_id=i,
        job_id="bench",
        tier=list(Tier)[i % 3],
        prompt=PREFIX + own if i % 2 else own,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.7, top_p=0.95),
        seed=i,
        eos_token_ids=(0, 1),
    )


if __name__ == "__main__":
    main()
