"""Workers as processes on a real broker, a real database and an S3 server: what a fleet does while nothing breaks."""

import json
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.fleet_bench import FleetBench, Worker, wait_until
from tests.services.servers import RabbitmqBroker, S3Bucket

from nightmill.broker import Broker
from nightmill.output import CheckpointWriter, OutputFolder
from nightmill.records import Completion, JobInfo
from nightmill.ringing import ring
from nightmill.states import JobStatus, ShardState, Tier
from nightmill.storage import LocalStorage


@pytest.fixture
def fleet(tmp_path: Path, postgres_url: str, rabbitmq: RabbitmqBroker) -> Iterator[FleetBench]:
    bench = FleetBench(tmp_path, {"DATABASE_URL": postgres_url, "CELERY_BROKER_URL": rabbitmq.url}, str(tmp_path))
    yield bench
    bench.close()


def test_case_I059_a_worker_is_killed_and_the_other_finishes_its_shards(
    fleet: FleetBench, moto_s3: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.environment |= moto_s3.env
    fleet.prefix = f"s3://{moto_s3.bucket}"
    for name, value in moto_s3.env.items():
        monkeypatch.setenv(name, value)
    script = {"step_s": 0.02}
    doomed = fleet.start(script, "--lease-ttl", "4")
    other = fleet.start(script, "--lease-ttl", "4")
    jobs = [fleet.submit(tier.value, 400, tier=tier) for tier in Tier]
    doomed.wait_for_log("committed")
    doomed.kill()
    for job in fleet.wait(*jobs):
        assert (job.status, job.rows.completed) == (JobStatus.COMPLETED, 400)
        fleet.check(job, 400)
    assert other.process.poll() is None
    # 16 in the engine, and a checkpoint of at most 256 rows or 5 s
    assert sum(fleet.store.job(job.job_id).rows_recomputed for job in jobs) <= 16 + 256
    log = [line for line in other.lines() if line["message"].startswith("committed")]
    assert all({"job", "shard", "attempt", "shard_id", "worker"} <= line.keys() for line in log)


def test_case_I082_a_drain_finishes_what_runs_and_nothing_is_computed_twice(fleet: FleetBench) -> None:
    first = fleet.start({"step_s": 0.03})
    job = fleet.submit("in", 600, max_tokens=12)
    first.wait_for_log("committed")
    first.process.send_signal(signal.SIGTERM)
    assert first.process.wait(25) == 0, first.log[-3000:]
    left = fleet.store.job(job.job_id)
    assert 0 < left.rows.completed < 600
    assert ShardState.LEASED not in left.num_shards_by_state
    second = fleet.start()
    (ended,) = fleet.wait(job)
    fleet.check(ended, 600)
    assert (ended.rows_recomputed, ended.rows.completed) == (0, 600)
    assert max(shard.attempt for shard in fleet.store.shard_results(job.job_id)) > 1
    assert second.process.poll() is None


@pytest.mark.long
def test_a_second_signal_stops_at_once(fleet: FleetBench) -> None:
    worker = fleet.start({"step_s": 0.1}, "--grace", "3600")
    job = fleet.submit("in", 64, shard_rows=64, max_tokens=200)
    _wait_running(fleet, job.job_id)
    worker.process.send_signal(signal.SIGHUP)
    worker.wait_for_log("stopping")
    worker.process.send_signal(signal.SIGQUIT)
    assert worker.process.wait(20) == 0, worker.log[-3000:]
    assert fleet.store.job(job.job_id).num_shards_by_state == {ShardState.AVAILABLE: 1}


def test_a_slice_ends_and_its_shard_goes_on(fleet: FleetBench) -> None:
    """No message outlives its slice, and no row is computed again for it."""
    worker = fleet.start({"step_s": 0.02}, "--slice", "1", "--slots", "high=0,normal=1,low=0")
    job = fleet.submit("in", 800, shard_rows=400)
    (ended,) = fleet.wait(job)
    fleet.check(ended, 800)
    assert [shard.attempt for shard in fleet.store.shard_results(job.job_id)] == [1, 1]
    assert ended.rows_recomputed == 0
    worker.process.send_signal(signal.SIGTERM)
    assert worker.process.wait(25) == 0
    broker = Broker(fleet.environment["CELERY_BROKER_URL"])
    assert broker.queue_depths()[Tier.NORMAL] == 0  # every bell was answered
    broker.close()


def test_case_I094_cancel_stops_the_engine_and_then_says_so(fleet: FleetBench) -> None:
    worker = fleet.start({"step_s": 0.05}, "--metrics-port", "0")
    job = fleet.submit("in", 300, shard_rows=100, max_tokens=200)
    _wait_running(fleet, job.job_id)
    assert _metric(worker, "nightmill_engine_running") > 0
    assert _health(worker)["status"] == "ok"
    fleet.store.cancel(job.job_id)
    (ended,) = fleet.wait(job)
    assert ended.status is JobStatus.CANCELLED
    rows = ended.rows
    assert rows.completed + rows.failed + rows.cancelled == rows.total == len(fleet.rows(job)) == 300
    assert _metric(worker, "nightmill_engine_running") == 0
    assert _metric(worker, 'nightmill_shard_attempts_ended_total{end="released"}') > 0


def test_a_retry_runs_the_failed_rows_alone(fleet: FleetBench) -> None:
    prompts = [f"{10 + i} {20 + i}" for i in range(60)]
    prompts[7] = prompts[41] = "999 5"
    poisoned = fleet.start({"traps": {"999": "kill"}, "step_s": 0.005})
    job = fleet.submit("in", prompts, shard_rows=30)
    (ended,) = fleet.wait(job)
    assert (ended.rows.completed, ended.rows.failed) == (58, 2)
    fleet.check(ended, prompts, errors={7: "quarantined", 41: "quarantined"})
    poisoned.kill()
    zombie_writes(job, row_index=41)
    fleet.start()
    assert fleet.store.reset_failed_rows(job.job_id) == 2
    ring(fleet.store, fleet.settings)
    (ended,) = fleet.wait(job)
    assert (ended.status, ended.rows.completed, ended.rows.failed) == (JobStatus.COMPLETED, 60, 0)
    fleet.check(ended, prompts)
    assert not list((fleet.path / "in-out").glob("_nightmill/*/**/ckpt-*")), "the zombie's is removed, too"
    attempts = {row["n"]: row["attempts"] for row in fleet.rows(job)}
    assert {n for n, attempt in attempts.items() if attempt > 1} == {7, 41}


def test_a_worker_serves_its_model_or_the_one_that_waits(fleet: FleetBench) -> None:
    picky = fleet.start(None, "--model", "a")
    jobs = [fleet.submit("one", 50, model="a"), fleet.submit("two", 50, model="b")]
    (done,) = fleet.wait(jobs[0])
    fleet.check(done, 50)
    assert fleet.store.job(jobs[1].job_id).status is JobStatus.QUEUED
    picky.kill()
    unable = fleet.start({"refused_models": ["c"]})
    jobs += [fleet.submit("three", 50, model="a"), fleet.submit("four", 50, model="c")]
    two, three = fleet.wait(*jobs[1:3])
    fleet.check(two, 50)
    fleet.check(three, 50)
    unable.wait_for_log("its jobs are left to other workers")
    fleet.start()
    (four,) = fleet.wait(jobs[3])
    fleet.check(four, 50)
    assert unable.process.poll() is None


@pytest.mark.long
def test_a_model_that_no_worker_can_load_fails_its_job(fleet: FleetBench) -> None:
    fleet.start({"refused_models": ["c"]})
    (job,) = fleet.wait(fleet.submit("in", 50, model="c"))
    assert (job.status, job.error_code, job.rows.cancelled) == (JobStatus.FAILED, "model_unavailable", 50)
    assert "no worker could load" in str(job.error_message)


def zombie_writes(job: JobInfo, row_index: int) -> None:
    """A checkpoint that an attempt from before the retry writes late, after the end has removed all others."""
    writer = CheckpointWriter(LocalStorage(), OutputFolder(job.spec.output, job.job_id).work, row_index // 30, 1)
    writer.add(
        Completion(
            row_index=row_index, custom_id=f"in.parquet#{row_index}", error_code="engine_error", error_message="late"
        )
    )
    writer.flush()


def _wait_running(fleet: FleetBench, job_id: str) -> None:
    wait_until(lambda: fleet.store.job(job_id).rows_running > 0, "rows to run")


def _get(worker: Worker, path: str) -> str:
    worker.wait_for_log("metrics and health on port")
    port = next(line["message"].split()[-1] for line in worker.lines() if "health on port" in line["message"])
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as answer:
        return str(answer.read().decode())


def _metric(worker: Worker, name: str) -> float:
    found = [line for line in _get(worker, "/metrics").splitlines() if line.startswith(f"{name} ")]
    assert found, _get(worker, "/metrics")
    return float(found[0].split()[-1])


def _health(worker: Worker) -> dict[str, object]:
    health: dict[str, object] = json.loads(_get(worker, "/healthz"))
    return health
