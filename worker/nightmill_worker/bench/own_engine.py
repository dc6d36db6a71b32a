"""Our engine over a workload: the loop and the model's runner in this process, as the engine process has them."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from nightmill.sampling import SamplingParams
from nightmill.states import Tier
from nightmill_worker.bench.measurement import Measurement
from nightmill_worker.bench.workload import Workload
from nightmill_worker.engine.loop import EngineLoop
from nightmill_worker.engine.options import LoopOptions, Policy
from nightmill_worker.engine.request import Finished, Request
from nightmill_worker.engine.step import Runner

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class OwnEngine:
    """A runner with the options of one comparison column."""

    name: str
    runner: Runner
    options: LoopOptions

    def run(self, workload: Workload, progress: Progress | None = None) -> Measurement:
        """Answer every row from an empty prefix index; `progress` gets the number of rows that finished in a step."""
        return self.answer(workload, progress)[0]

    def answer(self, workload: Workload, progress: Progress | None = None) -> tuple[Measurement, list[Finished]]:
        """As `run`, with the answers in the order in which rows finished; a `request_id` is a row's number."""
        loop = EngineLoop(self.runner, self.options)
        started = time.perf_counter()
        for request in _requests(workload):
            loop.add(request)
        finished: list[Finished] = []
        while loop.has_work:
            done = loop.step()
            finished += done
            if done and progress is not None:
                progress(len(done))
        seconds = time.perf_counter() - started
        stats = loop.stats()
        wanted = {i: row.max_tokens for i, row in enumerate(workload.rows)}
        measurement = Measurement(
            engine=self.name,
            workload=workload.name,
            rows=len(workload.rows),
            prompt_tokens=workload.prompt_tokens,
            output_tokens=workload.output_tokens,
            seconds=seconds,
            rows_wrong_length=sum(len(f.token_ids) != wanted[f.request_id] for f in finished)
            + len(wanted)
            - len(finished),
            detail={
                "steps": stats.steps,
                "mean_batch": round(stats.mean_batch, 2),
                "cached_tokens": stats.cached_tokens,
                "computed_tokens": stats.computed_tokens,
                "preemptions": stats.preemptions,
                "host_ms_per_step": round(
                    1e3 * (stats.plan_s + stats.build_s + stats.commit_s) / max(1, stats.steps), 3
                ),
                **({} if stats.roofline_share is None else {"roofline_share": round(stats.roofline_share, 4)}),
            },
        )
        return measurement, finished


def continuous(runner: Runner, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> OwnEngine:
    """The engine as `nightmill run` uses it."""
    return OwnEngine(
        "continuous",
        runner,
        LoopOptions(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
        ),
    )


def static(runner: Runner, *, batch_size: int, max_num_batched_tokens: int, max_model_len: int) -> OwnEngine:
    """The same engine held to static batches in file order, without the prefix index."""
    return OwnEngine(
        "static",
        runner,
        LoopOptions(
            max_num_seqs=batch_size,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            enable_prefix_caching=False,
            policy=Policy.STATIC,
        ),
    )


def _requests(workload: Workload) -> list[Request]:
    return [
        Request(
            request_id=i,
            job_id=workload.name,
            tier=Tier.NORMAL,
            prompt=row.prompt_ids,
            sampling=SamplingParams(max_tokens=row.max_tokens, ignore_eos=True),
            seed=i,
        )
        for i, row in enumerate(workload.rows)
    ]
