"""What a run has done so far, and its summary at the end."""

import resource
import sys
import time
from collections import Counter
from collections.abc import Sequence

from nightmill.records import CommittedShard, JobInfo
from nightmill_worker.engine.stats import EngineStats, roofline_share
from nightmill_worker.report import RunProgress, RunSummary
from nightmill_worker.shard_crew import ShardCrew
from nightmill_worker.supervisor import EngineSupervisor
from nightmill_worker.throughput import Throughput


class RunMeter:
    """Counters of one `nightmill run`."""

    def __init__(self) -> None:
        self._started_at = time.monotonic()
        self._total = 0
        self._counts: Counter[str] = Counter()  # of shards that are not at work
        self._throughput = Throughput()
        self._stats: list[EngineStats] = []
        self._deaths = 0
        self._working_since = self._started_at
        self._working_s = 0.0

    def start_from(self, shards: Sequence[CommittedShard], job: JobInfo) -> None:
        """What was there before this run."""
        self._total = job.rows.total
        for shard in shards:
            rows = shard.result.rows
            self._counts.update(completed=rows.completed, failed=rows.failed, resumed=rows.total)

    def begin(self) -> None:
        """The engine is there: rows will run from now on."""
        self._working_since = time.monotonic()
        self._throughput = Throughput()

    def look(self, crew: ShardCrew, supervisor: EngineSupervisor, *, draining: bool) -> RunProgress:
        """Progress now."""
        counts = self._counts + crew.counts
        stats = supervisor.stats()
        finished = counts["completed"] + counts["failed"]
        self._throughput.sample(finished, sum(s.generated_tokens for s in stats))
        feed = supervisor.status()
        engine_waiting = stats[-1].waiting if stats else 0
        return RunProgress(
            rows_total=self._total,
            rows_completed=counts["completed"],
            rows_failed=counts["failed"],
            rows_per_s=self._throughput.rows_per_s,
            tokens_per_s=self._throughput.tokens_per_s,
            running=stats[-1].running if stats else 0,
            waiting=feed.waiting + engine_waiting,
            eta_s=self._throughput.eta_s(self._total - finished),
            note="draining" if draining else "looking for the row that ends the engine" if feed.isolating else "",
        )

    def end(self, crew: ShardCrew, supervisor: EngineSupervisor) -> None:
        """The shards have ended; their counts are kept."""
        self._working_s += time.monotonic() - self._working_since
        self._counts += crew.counts
        self._stats += supervisor.stats()
        self._deaths += supervisor.status().deaths

    @property
    def rows_finished(self) -> int:
        """Rows with an answer or an error, as far as this run knows."""
        return self._counts["completed"] + self._counts["failed"]

    def summary(self, job: JobInfo) -> RunSummary:
        """Of the job as the store has it now."""
        steps = sum(s.steps for s in self._stats)
        generated = sum(s.generated_tokens for s in self._stats)
        return RunSummary(
            job=job.job_id,
            rows=job.rows.total,
            rows_ok=job.rows.completed,
            rows_failed=job.rows.failed + job.rows.cancelled,
            rows_resumed=self._counts["resumed"],
            rows_recomputed=self._counts["recomputed"],
            prompt_tokens=job.tokens.prompt,
            completion_tokens=job.tokens.completion,
            cached_tokens=job.tokens.cached,
            steps=steps,
            mean_batch=sum(s.mean_batch * s.steps for s in self._stats) / steps if steps else 0.0,
            seconds=time.monotonic() - self._started_at,
            output=job.spec.output,
            roofline_share=roofline_share(self._stats),
            generated_per_s=generated / self._working_s if self._working_s else 0.0,
            engine_deaths=self._deaths,
            preemptions=sum(s.preemptions for s in self._stats),
            preemptions_swap=sum(s.preemptions_swap for s in self._stats),
            peak_rss_bytes=_peak_rss_bytes(),
            error_codes=job.error_codes,
        )


def _peak_rss_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return unit * (own + resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
