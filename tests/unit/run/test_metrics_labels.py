"""However many jobs, shards and rows there are: a scrape has a bounded number of series."""

from collections import Counter, defaultdict
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client.core import Metric

from nightmill.records import ShardLease, ShardProgress, ShardRange
from nightmill.sampling import SamplingParams
from nightmill.states import Tier
from nightmill_worker.engine.fake import FakeRunnerConfig
from nightmill_worker.engine.loop import EngineLoop, LoopOptions
from nightmill_worker.engine.request import Request
from nightmill_worker.fleet import BellEnd
from nightmill_worker.metrics import MAX_JOBS, WorkerCollector
from nightmill_worker.shard import ShardEnd

# Every label there may be. A new one is named here once it was thought about how many values it takes.
LABELS = {"worker", "model", "tier", "state", "end", "place", "job", "kind"}


def scrape(num_jobs: int, shards_of_each: int) -> list[Metric]:
    """Of a worker that has shards of so many jobs at work, in an engine that knows them all."""
    loop = EngineLoop(FakeRunnerConfig().build(), LoopOptions(max_num_seqs=8, max_model_len=150))
    runs = []
    for number in range(num_jobs * shards_of_each):
        job_id = f"job-{number % num_jobs}"
        tier = list(Tier)[number % 3]
        shard = ShardRange(index=number, source_file="in", row_start=10 * number, row_end=10 * number + 10)
        lease = ShardLease(shard_id=number, job_id=job_id, range=shard, attempt=1, num_failures=0, worker_id="w")
        runs.append(SimpleNamespace(lease=lease, tier=tier, progress=ShardProgress(attempt=1, rows_completed=3)))
        sampling = SamplingParams(max_tokens=1)
        loop.add(Request(request_id=number, job_id=job_id, tier=tier, prompt=(number % 90,), sampling=sampling, seed=1))
    while loop.has_work:
        loop.step()
    stats = [loop.stats()]
    status = SimpleNamespace(waiting=0, in_engine=0, deaths=0, isolating=False)
    supervisor = SimpleNamespace(stats=lambda: stats, status=lambda: status)
    session = SimpleNamespace(model=SimpleNamespace(name="demo"), supervisor=supervisor)
    serving = SimpleNamespace(session=session, crew=SimpleNamespace(active=runs, counts=Counter(completed=3)))
    fleet = SimpleNamespace(
        ends=Counter([*(end.value for end in ShardEnd), "failed"]),
        bell_ends=Counter((tier, end) for tier in Tier for end in BellEnd),
    )
    slots = SimpleNamespace(limits=dict.fromkeys(Tier, 2), used=dict.fromkeys(Tier, 1))
    host = SimpleNamespace(serving=serving)
    return list(WorkerCollector(*cast("tuple[Any, Any, Any]", (fleet, host, slots)), "worker-1").collect())


def test_labels_are_few_and_their_values_bounded() -> None:
    few, many = scrape(2, 3), scrape(150, 4)
    values: dict[str, set[str]] = defaultdict(set)
    for metric in many:
        for sample in metric.samples:
            for name, value in sample.labels.items():
                values[name].add(value)
    assert set(values) == LABELS
    assert len(values["job"]) <= 2 * MAX_JOBS + 1, "those with shards here, those with most of the engine, and others"
    assert "other" in values["job"]
    assert {name: len(found) for name, found in values.items() if name not in ("job", "kind", "state", "end")} == {
        "worker": 1,
        "model": 1,
        "tier": len(Tier),
        "place": 2,
    }
    assert max(len(values[name]) for name in ("kind", "state", "end")) <= 16
    by_name = {metric.name: len(metric.samples) for metric in many}
    assert max(by_name.values()) <= (MAX_JOBS + 1) * len(Tier) * 5, "the widest: jobs by tier and kind of token"
    assert {metric.name for metric in few} == set(by_name), "no name is made of what is at work"
