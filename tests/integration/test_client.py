"""`nightmill.Client` against a store, an output and a worker that are real; the worker is a process of its own."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from tests.integration.fleet_bench import FleetBench, answer

from nightmill import Client, Job
from nightmill.errors import (
    ConfigError,
    JobStateError,
    NotFoundError,
    SpecMismatchError,
    ValidationError,
    WaitTimedOutError,
)
from nightmill.states import JobStatus, Tier

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetBench]:
    """One worker on a store in a file, for all tests of this module; inputs and outputs in folders."""
    path = tmp_path_factory.mktemp("client")
    bench = FleetBench(path, {"DATABASE_URL": f"sqlite:///{path}/nightmill.db"}, str(path))
    bench.start({"step_s": 0.02})
    bench.wait(bench.submit("warm-up", 1))
    yield bench
    bench.close()


@pytest.fixture
def client(fleet: FleetBench) -> Iterator[Client]:
    with Client(environ={"HOME": str(fleet.path), **fleet.environment}) as client:
        yield client


def submit(client: Client, fleet: FleetBench, name: str, rows: Any = 60, **flags: Any) -> Job:
    flags = {"max_tokens": 6, "shard_rows": 20, **flags}
    return client.submit(write(fleet, name, rows), f"{fleet.prefix}/{name}-out", "fake", **flags)


def write(fleet: FleetBench, name: str, rows: Any, **columns: Any) -> str:
    prompts = [f"{10 + i} 20" for i in range(rows)] if isinstance(rows, int) else rows
    table = pa.table({"prompt": pa.array(prompts, pa.string()), "custom_id": [f"id-{i}" for i in range(len(prompts))]})
    path = Path(fleet.prefix, f"{name}.parquet")
    if not path.exists():
        pq.write_table(table, path, row_group_size=20)
    return str(path)


def test_submit_wait_and_read_the_results(client: Client, fleet: FleetBench) -> None:
    prompts: list[str | None] = [f"{10 + i} 20" for i in range(60)]
    prompts[7], prompts[44] = None, ""
    job = submit(client, fleet, "results", prompts, tier="high")
    assert job.info().options.tier is Tier.HIGH
    seen: list[Any] = []
    info = job.wait(timeout="2m", on_progress=seen.append)
    assert (info.status, info.rows.completed, info.rows.failed) == (JobStatus.COMPLETED, 58, 2)
    assert seen[-1] == info
    assert job.done

    table = job.results()
    assert table.column_names[:2] == ["prompt", "custom_id"]
    assert table["custom_id"].to_pylist() == [f"id-{i}" for i in range(60)]
    expected = [answer(prompt, 6) if prompt else None for prompt in prompts]
    assert table["completion"].to_pylist() == expected
    assert pa.types.is_large_string(table.schema.field("completion").type)

    few = job.results(columns=["completion", "custom_id"])
    assert few.column_names == ["completion", "custom_id"]
    assert few["completion"].to_pylist() == expected

    batches = list(job.iter_results(["custom_id"], batch_rows=7))
    assert max(batch.num_rows for batch in batches) <= 7
    assert [row for batch in batches for row in batch.column(0).to_pylist()] == table["custom_id"].to_pylist()

    found = job.dataset().to_table(columns=["custom_id"], filter=pc.field("error_code").is_valid())
    assert found["custom_id"].to_pylist() == ["id-7", "id-44"]
    assert job.dataset().count_rows() == 60
    assert job.dataset().to_table().sort_by("row_index")["completion"].to_pylist() == expected

    errors = job.errors().to_pylist()
    assert [(row["row_index"], row["custom_id"], row["error_code"]) for row in errors] == [
        (7, "id-7", "null_prompt"),
        (44, "id-44", "empty_prompt"),
    ]
    assert all(row["error_message"] and row["source_file"] == "results.parquet" for row in errors)


def test_the_same_words_are_the_same_job(client: Client, fleet: FleetBench) -> None:
    first = submit(client, fleet, "same", idempotency_key="key-same")
    assert submit(client, fleet, "same", idempotency_key="key-same").id == first.id
    first.wait(timeout=120)
    again = submit(client, fleet, "same", idempotency_key="key-same")
    assert (again.id, again.status) == (first.id, JobStatus.COMPLETED)
    assert client.job(first.id).id == client.job(first.output).id == first.id
    assert first.id in [job.id for job in client.jobs(status="completed")]
    with pytest.raises(SpecMismatchError, match="max_tokens: 6 → 7"):
        submit(client, fleet, "same", max_tokens=7)
    with pytest.raises(SpecMismatchError, match="this idempotency key was used"):
        submit(client, fleet, "elsewhere", idempotency_key="key-same")
    assert not Path(fleet.prefix, "elsewhere-out").exists()


def test_what_does_not_fit_is_said_and_nothing_is_submitted(client: Client, fleet: FleetBench) -> None:
    before = len(client.jobs(limit=1000))
    with pytest.raises(ValidationError, match="no such file"):
        client.submit(f"{fleet.prefix}/nowhere/", f"{fleet.prefix}/nowhere-out", "fake")
    with pytest.raises(ValidationError, match="temperature"):
        submit(client, fleet, "bad", temperature=-1.0)
    with pytest.raises(ValidationError, match="urgent"):
        submit(client, fleet, "bad", tier="urgent")
    with pytest.raises(ValidationError, match="duration"):
        submit(client, fleet, "bad", expires_in="soon")
    with pytest.raises(TypeError, match="max_tokns"):
        submit(client, fleet, "bad", max_tokns=3)
    assert len(client.jobs(limit=1000)) == before
    assert not Path(fleet.prefix, "bad-out").exists()
    with pytest.raises(NotFoundError):
        client.job("job-nope")
    with pytest.raises(NotFoundError):
        client.job("/no/such/output")


def test_a_job_that_goes_on_has_no_results_yet_and_can_be_cancelled_and_retried(
    client: Client, fleet: FleetBench
) -> None:
    job = submit(client, fleet, "later", 400, max_tokens=240)  # two minutes of the scripted engine
    with pytest.raises(WaitTimedOutError):
        job.wait(timeout=0.2)
    with pytest.raises(JobStateError, match="not complete"):
        job.results()
    with pytest.raises(NotFoundError, match="no parts"):
        job.results(partial=True)
    with pytest.raises(JobStateError, match="has ended can be retried"):
        job.retry()
    assert job.cancel().status in (JobStatus.CANCELLING, JobStatus.CANCELLED)
    info = job.wait(timeout=120)
    assert info.status is JobStatus.CANCELLED
    assert info.rows.cancelled == job.errors().num_rows == 400 - info.rows.completed
    assert job.retry() == info.rows.cancelled
    assert not job.done
    job.cancel()
    job.wait(timeout=120)


def test_a_url_that_is_given_goes_before_the_environment(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path), "DATABASE_URL": "nonsense://"}
    with pytest.raises(ConfigError, match="DATABASE_URL"):
        Client(environ=environment)
    with Client(f"sqlite:///{tmp_path}/a.db", "amqp://user:secret@host//", environ=environment) as client:
        assert client.settings.broker_url == "amqp://user:secret@host//"
        assert client.jobs() == []


def test_a_broker_that_is_down_is_a_warning(
    fleet: FleetBench, tmp_path: Path, caplog: pytest.LogCaptureFixture, postgres_url: str
) -> None:
    with Client(postgres_url, "amqp://localhost:1//", environ={"HOME": str(tmp_path)}) as client:
        job = client.submit(write(fleet, "down", 20), str(tmp_path / "out"), "fake")
        assert job.status is JobStatus.QUEUED
    (record,) = [r for r in caplog.records if r.name == "nightmill.client"]
    assert record.levelname == "WARNING"
    assert "could not be rung" in record.getMessage()


def test_the_daily_example_does_its_work_once(fleet: FleetBench, tmp_path: Path) -> None:
    """Run as a scheduler would: a process, its exit code; and then once more."""
    source = write(fleet, "daily", ["11 20", None, "13 20"])
    command = [sys.executable, str(ROOT / "examples/etl_daily.py"), source, str(tmp_path), "--model", "fake"]
    environment = {**os.environ, **fleet.environment, "NIGHTMILL_HOME": str(tmp_path / "home")}

    def run() -> tuple[str, float]:
        ended = subprocess.run(
            [*command, "--date", "2026-11-29"], env=environment, capture_output=True, text=True, timeout=120
        )
        assert ended.returncode == 0, ended.stderr
        assert "null_prompt" in ended.stderr
        (part,) = (tmp_path / "completions/2026-11-29").glob("part-*.parquet")
        (job,) = [line.rpartition(" ")[2] for line in ended.stderr.splitlines() if " INFO job " in line]
        return job, part.stat().st_mtime_ns

    first = run()
    joined = pq.read_table(tmp_path / "joined-2026-11-29.parquet")
    assert joined["custom_id"].to_pylist() == ["id-0", "id-1", "id-2"]
    assert [text is None for text in joined["completion"].to_pylist()] == [False, True, False]
    assert joined["prompt"].to_pylist() == ["11 20", None, "13 20"]
    assert run() == first
    with Client(environ={"HOME": str(tmp_path), **fleet.environment}) as client:
        assert {shard.attempt for shard in client.store.shard_results(first[0])} == {1}
