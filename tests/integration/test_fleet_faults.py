"""A fleet whose broker, database or workers break: every row once, with its answer."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.integration.fleet_bench import FleetBench, wait_until
from tests.services.servers import RabbitmqBroker

from deploy.native.postgres import Postgres
from deploy.native.rabbitmq import Rabbitmq, RabbitmqOptions
from nightmill.broker import Broker
from nightmill.states import TERMINAL_JOB, JobStatus, ShardState, Tier


@pytest.fixture
def fleet(tmp_path: Path, postgres_url: str, rabbitmq: RabbitmqBroker) -> Iterator[FleetBench]:
    bench = FleetBench(tmp_path, {"DATABASE_URL": postgres_url, "CELERY_BROKER_URL": rabbitmq.url}, str(tmp_path))
    yield bench
    bench.close()


def test_case_I084_a_broker_that_dies_and_loses_all_costs_time_only(
    fleet: FleetBench, rabbitmq: RabbitmqBroker
) -> None:
    worker = fleet.start({"step_s": 0.02})
    jobs = [fleet.submit("one", 400)]
    worker.wait_for_log("committed")
    rabbitmq.server.kill()
    jobs.append(fleet.submit("two", 200))  # nobody can be rung for it: it is found in the store
    for job in fleet.wait(*jobs):
        fleet.check(job, 400 if job is not None and job.job_id == jobs[0].job_id else 200)
    heard = worker.log.count("listening to")
    rabbitmq.wipe()
    worker.wait_for_log("listening to", count=heard + 1)  # it has made the queues anew
    jobs.append(fleet.submit("three", 200))
    *_, three = fleet.wait(*jobs)
    fleet.check(three, 200)
    assert worker.process.poll() is None
    assert "Unrecoverable" not in worker.log
    for job in jobs:
        assert {shard.attempt for shard in fleet.store.shard_results(job.job_id)} == {1}


def test_a_database_that_crashes_mid_run_loses_no_shard(fleet: FleetBench, postgres_server: Postgres) -> None:
    worker = fleet.start({"step_s": 0.02})
    job = fleet.submit("in", 600)
    worker.wait_for_log("committed")
    postgres_server.kill()
    postgres_server.start()
    (ended,) = fleet.wait(job)
    fleet.check(ended, 600)
    assert ended.rows_recomputed == 0
    assert worker.process.poll() is None


@pytest.mark.parametrize(
    "point",
    ["after_claim:2", "after_checkpoint_put", "after_part_put", "before_commit", "after_commit", "in_finalize"],
)
def test_a_worker_dies_in_a_crash_window(fleet: FleetBench, point: str) -> None:
    flags = ("--lease-ttl", "2")
    doomed = fleet.start({"step_s": 0.01}, *flags, NIGHTMILL_FAILPOINT=point)
    job = fleet.submit("in", 300)
    assert doomed.process.wait(60) == -signal.SIGKILL, doomed.log[-3000:]
    survivor = fleet.start({"step_s": 0.01}, *flags)
    (ended,) = fleet.wait(job)
    assert (ended.status, ended.rows.completed) == (JobStatus.COMPLETED, 300)
    fleet.check(ended, 300)
    names = {path.name for path in (fleet.path / "in-out").iterdir()}
    parts = {f"part-{i:05d}.parquet" for i in range(3)}
    assert names - {"_nightmill"} == parts | {"_manifest.json", "_SUCCESS"}
    attempts = [shard.attempt for shard in fleet.store.shard_results(job.job_id)]
    assert max(attempts) <= 2
    if point in ("after_commit", "in_finalize"):
        assert min(attempts) == 1
    assert survivor.process.poll() is None


def test_case_I081_a_worker_that_wakes_up_late_writes_nothing(fleet: FleetBench) -> None:
    flags = ("--lease-ttl", "2")
    zombie = fleet.start({"step_s": 0.05}, *flags)
    job = fleet.submit("in", 200, max_tokens=20)
    zombie.wait_for_log("loaded in")
    wait_until(lambda: fleet.store.job(job.job_id).rows_running > 0, "rows to run")
    zombie.process.send_signal(signal.SIGSTOP)
    fleet.start({"step_s": 0.01}, *flags)
    (ended,) = fleet.wait(job)
    zombie.process.send_signal(signal.SIGCONT)
    zombie.wait_for_log("is lost")
    fleet.check(ended, 200)
    zombie.process.send_signal(signal.SIGTERM)
    assert zombie.process.wait(25) == 0
    fleet.check(ended, 200)
    assert fleet.store.job(job.job_id).num_shards_by_state == {ShardState.COMMITTED: 2}


def test_case_I062_rows_that_end_the_engine_are_found_among_several_shards(fleet: FleetBench) -> None:
    prompts = [f"{10 + i} {20 + i}" for i in range(90)]
    poison = {4: "999 1", 30: "999 2", 31: "999 3", 32: "998 4"}  # shard 1 holds nothing else; one hangs
    for index, prompt in poison.items():
        prompts[index] = prompt
    worker = fleet.start({"traps": {"999": "kill", "998": "hang"}}, "--step-timeout", "1")
    mixed = fleet.submit("mixed", prompts[:30] + prompts[33:], shard_rows=30)
    bad = fleet.submit("bad", [prompts[i] for i in (30, 31, 32)])
    mixed, bad = fleet.wait(mixed, bad)
    fleet.check(mixed, prompts[:30] + prompts[33:], errors={4: "quarantined"})
    fleet.check(bad, [prompts[i] for i in (30, 31, 32)], errors=dict.fromkeys(range(3), "quarantined"))
    assert (bad.status, bad.rows.failed) == (JobStatus.COMPLETED, 3)
    assert worker.process.poll() is None
    assert {shard.attempt for shard in fleet.store.shard_results(mixed.job_id)} == {1}  # nobody else is charged


@pytest.mark.long
@pytest.mark.parametrize("poisoned", [(17,), (14, 15)])  # two: on either side of where the search halves
def test_a_row_that_kills_the_whole_worker_each_time_is_quarantined(
    fleet: FleetBench, poisoned: tuple[int, ...]
) -> None:
    prompts = [f"{10 + i} {20 + i}" for i in range(60)]
    for row in poisoned:
        prompts[row] = "999 1"
    job = fleet.submit("in", prompts, shard_rows=30)
    script = {"traps": {"999": "kill_worker"}, "step_s": 0.005}
    for _ in range(12 * len(poisoned)):
        worker = fleet.start(script, "--lease-ttl", "2")
        wait_until(
            lambda worker=worker: (
                worker.process.poll() is not None or fleet.store.job(job.job_id).status in TERMINAL_JOB
            ),  # type: ignore[misc]
            "the worker to die, or the job to end",
        )
        if worker.process.poll() is None:
            break
    (ended,) = fleet.wait(job)
    fleet.check(ended, prompts, errors=dict.fromkeys(poisoned, "quarantined"))


@pytest.mark.long
@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
def test_case_I077_a_bell_that_is_answered_too_late_costs_a_channel_and_nothing_else(
    tmp_path: Path, postgres_url: str, rabbitmq_factory: Callable[[RabbitmqOptions], Rabbitmq], queue_type: str
) -> None:
    """The broker closes the channel of a consumer that does not acknowledge in time, and delivers again."""
    server = rabbitmq_factory(RabbitmqOptions(consumer_timeout_ms=2000, channel_tick_ms=500))
    environment = {"DATABASE_URL": postgres_url, "CELERY_BROKER_URL": server.url(), "NIGHTMILL_QUEUE_TYPE": queue_type}
    fleet = FleetBench(tmp_path, environment, str(tmp_path))
    broker = Broker(server.url())
    try:
        worker = fleet.start({"step_s": 0.05}, "--slots", "high=1,normal=2,low=0")
        job = fleet.submit("in", 300, max_tokens=20)  # seven waves of a second: a shard takes longer than the timeout
        wait_until(lambda: closed_for_timeouts(server) >= 1, "the broker to close a channel")
        urgent = fleet.submit("urgent", 20, tier=Tier.HIGH)  # rung on the channels that were opened since
        for ended, rows in zip(fleet.wait(job, urgent), (300, 20), strict=True):
            fleet.check(ended, rows)
            assert ended.rows_recomputed == 0
            assert {shard.attempt for shard in fleet.store.shard_results(ended.job_id)} == {1}
        assert worker.log.count("listening to") >= 2
        assert worker.process.poll() is None
        wait_until(lambda: set(broker.queue_depths().values()) == {0}, "all bells to be answered")
        worker.process.send_signal(signal.SIGTERM)
        assert worker.process.wait(25) == 0, worker.log[-3000:]
        assert set(broker.queue_depths().values()) == {0}, "none was held without an acknowledgement"
    finally:
        broker.close()
        fleet.close()


def closed_for_timeouts(server: Rabbitmq) -> int:
    return (server.folder / "rabbitmq.log").read_text(errors="replace").count("has timed out waiting for")
