"""Inputs that are deleted or overwritten under a job: its other rows are all there, theirs say so, and it ends."""

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.integration.fleet_bench import FleetBench, answer
from tests.services.servers import RabbitmqBroker, S3Bucket

from nightmill.janitor import Janitor
from nightmill.records import JobInfo, JobOptions, JobSpec, ModelSpec
from nightmill.ringing import ring
from nightmill.sampling import SamplingParams
from nightmill.states import JobStatus, ShardState
from nightmill.submission import submit_and_ring

ROWS = 120  # of each file


class Lake:
    """A fleet on S3 whose inputs come and go."""

    def __init__(self, fleet: FleetBench, bucket: S3Bucket) -> None:
        self.fleet = fleet
        self.bucket = bucket.bucket
        self.client = bucket.endpoint.client()

    def put(self, name: str, first: int = 10) -> None:
        prompts = [f"{first + i} {i % 7 + 2}" for i in range(ROWS)]
        table = pa.table({"prompt": prompts, "n": list(range(ROWS)), "custom_id": [f"{name}-{i}" for i in range(ROWS)]})
        schema = pa.schema(
            [("prompt", pa.string()), pa.field("n", pa.int64(), nullable=False), ("custom_id", pa.string())]
        )
        data = io.BytesIO()
        pq.write_table(table.cast(schema), data, row_group_size=40)
        self.client.put_object(Bucket=self.bucket, Key=f"in/{name}.parquet", Body=data.getvalue())

    def delete(self, name: str) -> None:
        self.client.delete_object(Bucket=self.bucket, Key=f"in/{name}.parquet")

    def submit(self, names: Sequence[str], **options: Any) -> JobInfo:
        spec = JobSpec(
            inputs=tuple(f"s3://{self.bucket}/in/{name}.parquet" for name in names),
            output=f"s3://{self.bucket}/out",
            model=ModelSpec(model="fake"),
            sampling=SamplingParams(max_tokens=4),
        )
        job, trouble = submit_and_ring(
            self.fleet.store, self.fleet.settings, spec, JobOptions(shard_rows=40, **options)
        )
        assert trouble is None
        return job

    def check(self, job: JobInfo, names: Sequence[str], lost: dict[str, str]) -> None:
        """Every row once and in order, with its own answer, or the error of its lost file."""
        rows = self.fleet.rows(job)
        assert len(rows) == ROWS * len(names)
        for place, row in enumerate(rows):
            name, i = names[place // ROWS], place % ROWS
            assert (row["source_file"], row["row_index"]) == (f"{name}.parquet", i)
            if name in lost:
                assert (row["error_code"], row["n"], row["prompt"]) == (lost[name], None, None)
                assert f"in/{name}.parquet" in row["error_message"]
                assert row["custom_id"] == f"{name}.parquet#{i}"
            else:
                assert row["completion"] == answer(row["prompt"], 4)
                assert (row["n"], row["custom_id"], row["error_code"]) == (i, f"{name}-{i}", None)


@pytest.fixture
def lake(
    tmp_path: Path, postgres_url: str, rabbitmq: RabbitmqBroker, moto_s3: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Lake]:
    environment = {"DATABASE_URL": postgres_url, "CELERY_BROKER_URL": rabbitmq.url, **moto_s3.env}
    for name, value in moto_s3.env.items():
        monkeypatch.setenv(name, value)
    bench = FleetBench(tmp_path, environment, f"s3://{moto_s3.bucket}")
    yield Lake(bench, moto_s3)
    bench.close()


def test_inputs_that_are_gone_or_overwritten_end_as_errors_and_a_retry_brings_them_back(lake: Lake) -> None:
    names = ("a", "b", "c")
    for name in names:
        lake.put(name)
    job = lake.submit(names)
    lake.delete("b")
    lake.put("c", first=300)
    worker = lake.fleet.start()
    (ended,) = lake.fleet.wait(job)
    assert (ended.status, ended.rows.completed, ended.rows.failed) == (JobStatus.COMPLETED, ROWS, 2 * ROWS)
    assert ended.error_codes == {"source_changed": ROWS, "source_missing": ROWS}
    assert ended.num_shards_by_state == {ShardState.COMMITTED: 3, ShardState.DISCARDED: 6}
    lake.check(ended, names, {"b": "source_missing", "c": "source_changed"})
    attempts = [shard.attempt for shard in lake.fleet.store.shard_results(job.job_id)]
    assert max(attempts) <= 6, "bounded: the budget, and the closer"

    lake.put("b")
    lake.put("c")
    assert lake.fleet.store.reset_failed_rows(job.job_id) == 6
    ring(lake.fleet.store, lake.fleet.settings)
    (ended,) = lake.fleet.wait(job)
    assert (ended.status, ended.rows.completed) == (JobStatus.COMPLETED, 3 * ROWS)
    lake.check(ended, names, {})
    assert worker.process.poll() is None


def test_a_job_whose_only_input_is_gone_fails(lake: Lake) -> None:
    lake.put("a")
    job = lake.submit(["a"])
    lake.delete("a")
    lake.fleet.start()
    (ended,) = lake.fleet.wait(job)
    assert (ended.status, ended.error_code, ended.rows.failed) == (JobStatus.FAILED, "every_shard_discarded", ROWS)
    lake.check(ended, ["a"], {"a": "source_missing"})


def test_a_cancelled_job_whose_input_is_gone_ends_at_once(lake: Lake) -> None:
    for name in ("a", "b"):
        lake.put(name)
    job = lake.submit(["a", "b"])
    lake.delete("b")
    lake.fleet.store.cancel(job.job_id)
    report = Janitor(lake.fleet.store, lake.fleet.settings).sweep()
    assert (report.ended, report.troubles) == ([job.job_id], [])
    ended = lake.fleet.store.job(job.job_id)
    assert (ended.status, ended.rows.cancelled) == (JobStatus.CANCELLED, 2 * ROWS)
    rows = lake.fleet.rows(ended)
    assert {row["error_code"] for row in rows} == {"batch_cancelled"}
    assert [row["n"] for row in rows] == [*range(ROWS), *[None] * ROWS]
