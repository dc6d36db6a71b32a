"""`make up` and `make down` as a person runs them: the whole system, one job through it, and nothing left behind."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import duckdb
import duckdb_extension_httpfs
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
from tests.unit.deploy.compose_check import Deployment, asked_metrics

from deploy.native.folder import remove, scratch
from deploy.native.packages import BASE, CEPH, missing
from deploy.native.record import ProcessRecord
from deploy.native.s3 import S3Endpoint
from deploy.native.state import State

NUM_ROWS = 3000
SCRIPT = '{"step_s": 0.001}'


class Checkout:
    """A folder like `.nightmill`, and the commands behind `make up` and `make down`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = State(folder)

    def call(self, *words: str) -> "subprocess.CompletedProcess[str]":
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "NIGHTMILL_"))}
        command = [sys.executable, "-m", "deploy.native", "--folder", str(self.folder), *words]
        # Output into files: a process that outlives the command would hold a pipe open.
        with (self.folder / "out").open("w+") as out:
            done = subprocess.run(command, env=environment, stdout=out, stderr=out, text=True, timeout=240, check=False)
            out.seek(0)
            return subprocess.CompletedProcess(command, done.returncode, out.read(), "")

    def up(self, *words: str) -> "subprocess.CompletedProcess[str]":
        return self.call("up", "--fake-engine", SCRIPT, *words)

    @property
    def env(self) -> dict[str, str]:
        """The variables as a shell reads them."""
        shell = 'set -a; . "$1"; exec env -0'
        out = subprocess.run(["sh", "-c", shell, "-", self.state.env_file], capture_output=True, check=True).stdout
        return dict(item.split("=", 1) for item in out.decode().split("\0") if item)

    def nightmill(self, *words: str) -> "subprocess.CompletedProcess[str]":
        return self.shell('exec nightmill "$@"', *words)

    def shell(self, line: str, *words: str) -> "subprocess.CompletedProcess[str]":
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = self.env | {"NIGHTMILL_HOME": str(self.folder / "client"), "PATH": path}
        return subprocess.run(
            ["sh", "-c", line, "-", *words], env=environment, capture_output=True, text=True, timeout=120, check=False
        )


@pytest.fixture
def checkout() -> Iterator[Checkout]:
    if (absent := missing(BASE)) and os.environ.get("CI") != "true":
        pytest.skip(f"not installed: {' '.join(absent)}; run `make services`")
    folder = scratch("nightmill-up")
    checkout = Checkout(folder)
    yield checkout
    checkout.call("down")
    remove(folder)


@pytest.mark.parametrize(
    "s3",
    ["moto", pytest.param("ceph", marks=pytest.mark.long)],
)
def test_a_job_through_the_whole_system(checkout: Checkout, s3: str) -> None:
    if s3 == "ceph":
        assert not missing(CEPH), "run `make services`"
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        up = checkout.up("--s3", s3)
        assert up.returncode == 0, up.stdout
        env = checkout.env
        endpoint = S3Endpoint(
            url=env["AWS_ENDPOINT_URL_S3"], access_key=env["AWS_ACCESS_KEY_ID"], secret_key=env["AWS_SECRET_ACCESS_KEY"]
        )
        said = re.search(r"then:  (nightmill submit .* --wait)", up.stdout)
        assert said is not None
        first = checkout.shell(said[1] + " --json")  # to the letter what a newcomer is told to run
        assert first.returncode == 0, first.stderr
        assert json.loads(first.stdout)["request_counts"]["completed"] == 16
        endpoint.delete_bucket(env["NIGHTMILL_BUCKET"])
        endpoint.create_bucket(env["NIGHTMILL_BUCKET"])
        _put_prompts(endpoint, env["NIGHTMILL_BUCKET"])

        job = checkout.nightmill(
            *("submit", f"s3://{env['NIGHTMILL_BUCKET']}/prompts/", "-o", f"s3://{env['NIGHTMILL_BUCKET']}/answers/"),
            *("--model", "any", "--max-tokens", "4", "--shard-rows", "500", "--wait", "--json"),
        )
        assert job.returncode == 0, job.stderr
        assert json.loads(job.stdout)["request_counts"]["completed"] == NUM_ROWS
        _read_back(endpoint, env["NIGHTMILL_BUCKET"])
        _compare_metrics(up.stdout)

        again = checkout.up()
        assert again.returncode == 0
        assert "already up" in again.stdout
        records = checkout.state.read()
        assert {record.name for record in records} >= {"postgres", "rabbitmq", "epmd", "worker-1", "worker-2"}
        assert all(record.alive for record in records)

        down = checkout.call("down")
        assert down.returncode == 0, down.stdout
        assert "was killed" not in down.stdout
        assert not any(record.alive for record in records)
        assert not checkout.state.env_file.exists()
        assert bystander.poll() is None
        assert "nothing is up" in checkout.call("down").stdout
    finally:
        bystander.kill()
        bystander.wait()


def test_what_has_ended_is_named_and_a_failed_start_leaves_nothing(checkout: Checkout) -> None:
    State(checkout.folder).data.mkdir()
    # RabbitMQ cannot start, after PostgreSQL has: its log, which has the reason, is to be shown.
    (checkout.state.data / "rabbitmq").mkdir()
    (checkout.state.data / "rabbitmq/advanced.config").mkdir()
    failed = checkout.up("--s3", "moto")
    assert failed.returncode == 1
    assert "stopping postgres" in failed.stdout
    assert checkout.state.read() == []
    assert not checkout.state.env_file.exists()

    (checkout.state.data / "rabbitmq/advanced.config").rmdir()
    assert checkout.up("--s3", "moto", "--workers", "1").returncode == 0
    (worker,) = [record for record in checkout.state.read() if record.name == "worker-1"]
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait(10)
    refused = checkout.up("--s3", "moto")
    assert refused.returncode == 1
    assert re.search(r"worker-1 has ended; the end of .*worker-1\.log(?s:.*)make down", refused.stdout)


def test_a_pid_that_now_is_anothers_is_left_alone() -> None:
    other = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        record = ProcessRecord(
            name="gone", pid=other.pid, started=1, stop_signal=int(signal.SIGTERM), grace_s=1.0, log="nowhere"
        )
        assert not record.alive
        record.ask_to_stop()
        record.kill_group()
        assert record.wait(1.0)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def _put_prompts(endpoint: S3Endpoint, bucket: str) -> None:
    table = pa.table(
        {
            "custom_id": [f"row-{i}" for i in range(NUM_ROWS)],
            "prompt": [f"{i % 90 + 2} {i % 7 + 2}" for i in range(NUM_ROWS)],
        }
    )
    client = endpoint.client()
    for part in range(3):
        body = io.BytesIO()
        pq.write_table(table.slice(part * NUM_ROWS // 3, NUM_ROWS // 3), body, row_group_size=100)
        client.put_object(Bucket=bucket, Key=f"prompts/{part}.parquet", Body=body.getvalue())
    client.close()


def _read_back(endpoint: S3Endpoint, bucket: str) -> None:
    """The three readers that people use, through S3; what begins with _ is not theirs to see."""
    host = endpoint.url.removeprefix("http://")
    expected = {f"row-{i}" for i in range(NUM_ROWS)}

    with duckdb.connect() as connection:
        extensions = Path(duckdb_extension_httpfs.__file__).parent / "extensions"
        (httpfs,) = extensions.glob("v*/httpfs.duckdb_extension")
        connection.execute(f"LOAD '{httpfs}'")
        connection.execute(
            f"CREATE SECRET (TYPE s3, KEY_ID '{endpoint.access_key}', SECRET '{endpoint.secret_key}', "
            f"REGION 'us-east-1', ENDPOINT '{host}', URL_STYLE 'path', USE_SSL false)"
        )
        query = f"SELECT custom_id FROM 's3://{bucket}/answers/*.parquet' WHERE completion IS NOT NULL"
        ids = [row[0] for row in connection.execute(query).fetchall()]
    assert (len(ids), set(ids)) == (NUM_ROWS, expected)

    options = {
        "aws_endpoint_url": endpoint.url,
        "aws_access_key_id": endpoint.access_key,
        "aws_secret_access_key": endpoint.secret_key,
        "aws_region": "us-east-1",
        "aws_allow_http": "true",
    }
    frame = pl.read_parquet(f"s3://{bucket}/answers/*.parquet", storage_options=options)
    assert (frame.height, set(frame["custom_id"])) == (NUM_ROWS, expected)

    filesystem = pyarrow.fs.S3FileSystem(
        access_key=endpoint.access_key,
        secret_key=endpoint.secret_key,
        endpoint_override=host,
        scheme="http",
        region="us-east-1",
    )
    table = pd.read_parquet(f"{bucket}/answers", filesystem=filesystem)
    assert (len(table), set(table["custom_id"])) == (NUM_ROWS, expected)


def _compare_metrics(said: str) -> None:
    """What dashboards and alerts ask for, workers that have worked tell."""
    told: set[str] = set()
    for url in re.findall(r"http://127\.0\.0\.1:\d+/metrics", said):
        with urllib.request.urlopen(url, timeout=10) as answer:
            told |= set(re.findall(r"^(nightmill_[a-z_]+)", answer.read().decode(), re.MULTILINE))
    # Only while a job is at work.
    assert asked_metrics(Deployment.load()) - told <= {"nightmill_job_rows"}
