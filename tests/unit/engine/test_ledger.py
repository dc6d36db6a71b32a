"""What each job has had of the engine: all of it together is all there was."""

import random
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightmill.sampling import SamplingParams
from nightmill.states import Tier
from nightmill_worker.engine.fake import FakeRunnerConfig
from nightmill_worker.engine.ledger import Ledger
from nightmill_worker.engine.loop import EngineLoop
from nightmill_worker.engine.options import LoopOptions
from nightmill_worker.engine.request import FinishReason, Request
from nightmill_worker.engine.stats import EngineStats, WorkStats
from nightmill_worker.metrics import MAX_JOBS, engine_metrics, work_metrics

SUMS = (
    *("waiting", "running", "swapped", "finished", "errors", "aborted"),
    *("prompt_tokens", "cached_tokens", "computed_tokens", "recomputed_tokens", "generated_tokens", "preemptions"),
)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def assert_adds_up(stats: EngineStats, *, over: tuple[str, ...] = SUMS) -> None:
    assert stats.work is not None
    assert sum(work.engine_ns for work in stats.work) + stats.idle_ns == stats.wall_ns
    for name in over:
        assert sum(getattr(work, name) for work in stats.work) == getattr(stats, name), name


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 10**13), st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9000)), max_size=5)),
        max_size=30,
    )
)
def test_every_nanosecond_is_somebodys(steps: list[tuple[int, list[tuple[int, int]]]]) -> None:
    now = 17
    ledger = Ledger(lambda: now)
    entries = [ledger.entry(f"job-{i // 2}", list(Tier)[i % 3]) for i in range(10)]
    for entry in entries:
        ledger.begin(entry, 1)
    for elapsed, rows in steps:
        now += elapsed
        if rows:
            mine, counts = ints(*(entries[i] for i, _ in rows)), ints(*(count for _, count in rows))
            ledger.book(mine, counts, None, mine)
            ledger.charge()
        else:
            ledger.idle()
    had = ledger.snapshot(ints(), ints(), ints())
    assert sum(work.engine_ns for work in had) + ledger.idle_ns == ledger.wall_ns == now - 17


def test_time_goes_by_computed_tokens() -> None:
    now = 0
    ledger = Ledger(lambda: now)
    one, other = ledger.entry("one", Tier.HIGH), ledger.entry("other", Tier.LOW)
    now = 900
    ledger.book(ints(one, other, one), ints(100, 300, 50), None, ints(one))
    ledger.charge()
    assert {work.job_id: work.engine_ns for work in ledger.snapshot(ints(), ints(), ints())} == {
        "one": 300,
        "other": 600,
    }


def test_a_forgotten_job_that_is_still_charged_loses_nothing() -> None:
    now = 0
    ledger = Ledger(lambda: now)
    entry = ledger.entry("gone", Tier.HIGH)
    ledger.begin(entry, 10)
    ledger.admit(entry, 10, 8, 0)
    ledger.book(ints(entry), ints(3), None, ints(entry))
    ledger.end(entry, FinishReason.STOP, 0, 0)
    ledger.forget(["gone"])
    now = 500
    ledger.charge()
    assert [(work.job_id, work.engine_ns, work.finished) for work in ledger.snapshot(ints(), ints(), ints())] == [
        ("", 500, 1)
    ]


def request(i: int, rng: random.Random, *, job_id: str | None = None) -> Request:
    prefix = tuple(range(50)) if i % 3 else ()
    return Request(
        request_id=i,
        job_id=job_id or f"job-{i % 4}",
        tier=list(Tier)[rng.randrange(3)],
        prompt=(*prefix, *(rng.randrange(1000) for _ in range(rng.randrange(1, 40)))),
        sampling=SamplingParams(max_tokens=rng.randrange(1, 40)),
        seed=i,
        eos_token_ids=tuple(range(20)),
    )


@pytest.mark.parametrize("seed", range(8))
def test_jobs_add_up_to_the_engine(seed: int) -> None:
    rng = random.Random(seed)
    config = FakeRunnerConfig(num_pages=40, page_size=8, fail_token=3, num_host_pages=40 * (seed % 2))
    loop = EngineLoop(config.build(), LoopOptions(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=150))
    for i in range(120):
        loop.add(request(i, rng))
        if rng.random() < 0.5:
            loop.step()
        if rng.random() < 0.1:
            loop.cancel([rng.randrange(i + 1)])
        if rng.random() < 0.1:
            loop.preempt(rng.randrange(i + 1))
        if rng.random() < 0.2:
            # Preemptions are known of those that have ended.
            assert_adds_up(loop.stats(), over=SUMS[:-1])
            work = loop.stats().work
            assert work is not None
            assert all(one.remaining_tokens >= one.running for one in work)
    loop.add(request(1000, rng, job_id="refused"))
    loop.cancel_job("job-2")
    while loop.has_work:
        loop.step()
    stats = loop.stats()
    assert_adds_up(stats)
    assert stats.work is not None
    assert {one.job_id for one in stats.work} == {"job-0", "job-1", "job-2", "job-3", "refused"}
    assert all(one.remaining_tokens == one.waiting == one.running == 0 for one in stats.work)
    assert stats.preemptions > 0
    assert stats.errors > 0
    assert stats.aborted > 0
    assert stats.peak_pages <= stats.pages_total


def test_hundreds_of_jobs_are_kept_as_few() -> None:
    loop = EngineLoop(FakeRunnerConfig().build(), LoopOptions(max_num_seqs=8, max_model_len=150))
    for i in range(400):
        job = f"job-{i}"
        sampling = SamplingParams(max_tokens=1)
        loop.add(Request(request_id=i, job_id=job, tier=Tier.HIGH, prompt=(i,), sampling=sampling, seed=i))
        loop.step()
    assert loop.ledger.num_entries <= 1 + 256
    stats = loop.stats()
    assert_adds_up(stats)
    assert stats.work is not None
    assert stats.work[0].job_id == ""
    assert stats.work[0].finished >= 400 - 256


def test_the_documentation_names_every_field() -> None:
    text = (Path(__file__).parents[3] / "docs/metrics.md").read_text()
    for record in (EngineStats, WorkStats):
        table = text[text.index(f"## {record.__name__}") :]
        assert [field.name for field in fields(record) if f"| `{field.name}` |" not in table] == []


def test_prometheus_gets_every_number_and_few_jobs() -> None:
    loop = EngineLoop(FakeRunnerConfig().build(), LoopOptions(max_num_seqs=8, max_model_len=150))
    for i in range(50):
        sampling = SamplingParams(max_tokens=3)
        loop.add(Request(request_id=i, job_id=f"j{i}", tier=Tier.LOW, prompt=(i, 5), sampling=sampling, seed=i))
    while loop.has_work:
        loop.step()
    stats = loop.stats()
    by_name = {metric.name: metric for metric in (*engine_metrics([stats, stats]), *work_metrics([stats]))}
    (wall,) = by_name["nightmill_engine_wall_seconds"].samples
    assert wall.value == pytest.approx(2e-9 * stats.wall_ns)
    assert by_name["nightmill_engine_generated_tokens"].samples[0].value == 2 * 150
    seconds = by_name["nightmill_job_engine_seconds"].samples
    assert len(seconds) == MAX_JOBS + 1
    assert sum(sample.value for sample in seconds) == pytest.approx(1e-9 * (stats.wall_ns - stats.idle_ns))
    tokens = by_name["nightmill_job_tokens"].samples
    assert sum(sample.value for sample in tokens if sample.labels["kind"] == "prompt") == 100


def test_what_remains_follows_what_is_done() -> None:
    loop = EngineLoop(FakeRunnerConfig().build(), LoopOptions(max_num_seqs=2, max_model_len=150))
    for i in range(6):
        prompt = tuple(range(100 * i, 100 * i + 20))
        loop.add(
            Request(
                request_id=i, job_id="job", tier=Tier.LOW, prompt=prompt, sampling=SamplingParams(max_tokens=10), seed=i
            )
        )
    seen = []
    while loop.has_work:
        work = loop.stats().work
        assert work is not None
        seen.append(work[0].remaining_tokens)
        loop.step()
    assert seen[0] == 6 * 30
    assert seen == sorted(seen, reverse=True)
