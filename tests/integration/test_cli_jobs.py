"""submit, wait, watch, cancel, retry, results as a shell sees them: processes, their streams and exit codes."""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from tests.integration.fleet_bench import FleetBench, answer, wait_until
from tests.services.servers import S3Bucket

from nightmill import Client
from nightmill.cli.main import cli
from nightmill.states import JobStatus

NIGHTMILL = str(Path(sys.executable).with_name("nightmill"))


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetBench]:
    """One worker on a store in a file, for all tests of this module."""
    path = tmp_path_factory.mktemp("jobs")
    bench = FleetBench(path, {"DATABASE_URL": f"sqlite:///{path}/nightmill.db", "NIGHTMILL_HOME": str(path)}, str(path))
    bench.start({"step_s": 0.02})
    bench.wait(bench.submit("warm-up", 1))
    yield bench
    bench.close()


def spawn(fleet: FleetBench, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [NIGHTMILL, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **fleet.environment, **environment},
    )


def call(fleet: FleetBench, *arguments: str, **environment: str) -> Ended:
    """In this process: a second less for each."""
    result = CliRunner().invoke(cli, list(arguments), env={**fleet.environment, **environment})
    assert "Traceback" not in result.stderr
    return Ended(result.exit_code, result.stdout, result.stderr)


def shell(fleet: FleetBench, *arguments: str) -> Ended:
    """As a process."""
    with spawn(fleet, *arguments) as process:
        out, err = process.communicate(timeout=120)
    return Ended(process.returncode, out, err)


def job_of(fleet: FleetBench, name: str, prompts: Any = 40, *, tokens: int = 6) -> list[str]:
    """The arguments of `submit` for a job of this name."""
    rows = [f"{10 + i} 20" for i in range(prompts)] if isinstance(prompts, int) else prompts
    path = Path(fleet.prefix, f"{name}.parquet")
    if not path.exists():
        ids = [f"id-{i}" for i in range(len(rows))]
        pq.write_table(pa.table({"prompt": pa.array(rows, pa.string()), "custom_id": ids}), path, row_group_size=20)
    flags = ["--model", "fake", "--max-tokens", str(tokens), "--shard-rows", "20"]
    return [str(path), "-o", f"{fleet.prefix}/{name}-out", *flags]


LONG = {"prompts": 400, "tokens": 240}
"""Two minutes of the scripted engine, for jobs that a test stops."""


def test_submit_prints_the_id_alone_and_wait_says_how_it_ended(fleet: FleetBench) -> None:
    submitted = shell(fleet, "submit", *job_of(fleet, "plain"))
    assert submitted.code == 0, submitted.err
    job_id = submitted.out.strip()
    assert submitted.out == f"{job_id}\n"
    assert job_id.startswith("job-")
    assert "40 rows in 2 shards" in submitted.err
    waited = shell(fleet, "wait", job_id, "--json")
    assert waited.code == 0, waited.err
    ended = json.loads(waited.out)
    assert (ended["id"], ended["status"]) == (job_id, "completed")
    assert call(fleet, "wait", f"{fleet.prefix}/plain-out").out == ""
    assert call(fleet, "submit", *job_of(fleet, "plain")).out == submitted.out
    table = pa.concat_tables(pq.read_table(p) for p in sorted(Path(fleet.prefix, "plain-out").glob("part-*.parquet")))
    assert table["completion"].to_pylist() == [answer(f"{10 + i} 20", 6) for i in range(40)]


def test_submit_and_wait_in_one(fleet: FleetBench) -> None:
    done = call(fleet, "submit", *job_of(fleet, "one"), "--wait")
    assert (done.code, done.out.count("\n")) == (0, 1), done.err
    assert "completed  40/40 rows (100.0 %)" in done.err
    again = call(fleet, "submit", *job_of(fleet, "one"), "--wait", "--json", "--quiet")
    assert (again.code, again.err) == (0, "")
    assert json.loads(again.out)["request_counts"]["completed"] == 40


def test_case_I033_a_job_whose_rows_all_failed_is_exit_5(fleet: FleetBench) -> None:
    done = call(fleet, "submit", *job_of(fleet, "allbad", [None] * 9), "--wait", "--json")
    assert done.code == 5
    ended = json.loads(done.out)
    assert (ended["status"], ended["request_counts"]["failed"]) == ("completed", 9)
    assert "every row failed" in done.err
    assert call(fleet, "wait", ended["id"]).code == 5
    assert call(fleet, "watch", ended["id"]).code == 5


def test_more_failed_rows_than_allowed_is_exit_5(fleet: FleetBench) -> None:
    prompts = [None] * 6 + ["10 20"] * 14
    done = call(fleet, "submit", *job_of(fleet, "budget", prompts), "--max-failed-rows", "5", "--wait", "--json")
    assert done.code == 5, done.err
    assert json.loads(done.out)["request_counts"]["failed"] >= 6


def test_validation_is_exit_3_and_submits_nothing(fleet: FleetBench) -> None:
    before = call(fleet, "list", "--json", "--limit", "1000").out
    arguments = job_of(fleet, "misnamed")
    for wrong in (
        [arguments[0] + "x", *arguments[1:]],
        [*arguments, "--prompt-column", "promt"],
        [*arguments, "--output-column", "prompt"],
    ):
        refused = call(fleet, "submit", *wrong)
        assert (refused.code, refused.out) == (3, ""), refused.err
        assert "error" in refused.err
    assert call(fleet, "list", "--json", "--limit", "1000").out == before
    assert not Path(fleet.prefix, "misnamed-out").exists()


def test_case_I018_duplicate_ids_are_refused_at_submit(fleet: FleetBench) -> None:
    path = Path(fleet.prefix, "twice.parquet")
    pq.write_table(pa.table({"prompt": ["1 2", "3 4"], "custom_id": ["a", "a"]}), path)
    arguments = ["submit", str(path), "-o", f"{fleet.prefix}/twice-out", "--model", "fake", "--max-tokens", "3"]
    refused = call(fleet, *arguments)
    assert (refused.code, refused.out) == (3, "")
    assert "row 0" in refused.err
    assert "row 1" in refused.err
    allowed = call(fleet, *arguments, "--allow-duplicate-ids", "--wait")
    assert allowed.code == 0, allowed.err
    rows = pq.read_table(Path(fleet.prefix, "twice-out/part-00000.parquet")).to_pylist()
    assert [(row["custom_id"], row["row_index"]) for row in rows] == [("a", 0), ("a", 1)]


def test_case_I026_foreign_files_in_the_output_are_refused_and_stay(fleet: FleetBench) -> None:
    arguments = job_of(fleet, "foreign")
    folder = Path(fleet.prefix, "foreign-out")
    folder.mkdir()
    (folder / "theirs.parquet").write_text("theirs")
    refused = call(fleet, "submit", *arguments)
    assert (refused.code, refused.out) == (3, "")
    assert [path.name for path in folder.iterdir()] == ["theirs.parquet"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--tier", "urgent"], "urgent"),
        (["--timeout", "5s"], "--wait"),
        (["--max-num-seqs", "3"], "No such option"),
    ],
)
def test_usage_is_exit_2(fleet: FleetBench, flags: list[str], words: str) -> None:
    refused = call(fleet, "submit", *job_of(fleet, "usage"), *flags)
    assert (refused.code, refused.out) == (2, "")
    assert words in refused.err


@pytest.mark.parametrize("command", ["wait", "watch", "retry", "cancel", "status", "results", "errors"])
def test_an_unknown_job_is_exit_4(fleet: FleetBench, command: str) -> None:
    assert call(fleet, command, "job-nope").code == 4


def test_an_option_that_changes_nothing_is_named(fleet: FleetBench) -> None:
    call(fleet, "submit", *job_of(fleet, "kept"), "--wait")
    again = call(fleet, "submit", *job_of(fleet, "kept"), "--shard-rows", "30")
    assert again.code == 0
    assert "--shard-rows 30 changes nothing" in again.err


def test_a_job_that_is_stopped(fleet: FleetBench) -> None:
    """Timeout, signals, cancel, retry: of one job that would run for long."""
    job_id = call(fleet, "submit", *job_of(fleet, "stopped", **LONG)).out.strip()
    late = call(fleet, "wait", job_id, "--timeout", "1s")
    assert (late.code, late.out) == (124, "")
    assert f"nightmill cancel {job_id}" in late.err
    assert call(fleet, "submit", *job_of(fleet, "stopped", **LONG), "--wait", "--timeout", "0.1s").code == 124

    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        with spawn(fleet, "wait", job_id) as waiting:
            assert waiting.stderr is not None
            waiting.stderr.readline()  # it waits
            waiting.send_signal(number)
            waiting.communicate(timeout=60)
        assert waiting.returncode == code
    assert fleet.store.job(job_id).status in (JobStatus.QUEUED, JobStatus.IN_PROGRESS)

    still = call(fleet, "retry", job_id)
    assert (still.code, still.out) == (1, "")
    assert "ended" in still.err

    with spawn(fleet, "watch", job_id, "--every", "0.2") as watching:
        cancelled = call(fleet, "cancel", job_id, "--wait", "--json")
        _, shown = watching.communicate(timeout=60)
    assert (cancelled.code, json.loads(cancelled.out)["status"]) == (0, "cancelled")
    assert (watching.returncode, "cancelled" in shown) == (6, True)
    assert call(fleet, "wait", job_id).code == 6

    rows = fleet.store.job(job_id).rows
    assert rows.completed + rows.failed + rows.cancelled == rows.total == 400
    retried = call(fleet, "retry", job_id)
    assert (retried.code, retried.out) == (0, f"{rows.cancelled}\n")
    shown_command = shlex.split(retried.err[retried.err.index("nightmill run") :].splitlines()[0])
    assert shown_command[2:] == job_of(fleet, "stopped", **LONG)
    assert not fleet.store.job(job_id).finished_at
    assert call(fleet, "cancel", job_id, "--wait").code == 0


def test_an_expired_job_is_exit_6(fleet: FleetBench) -> None:
    arguments = job_of(fleet, "expired", **LONG)
    done = call(fleet, "submit", *arguments, "--expires-in", "1s", "--wait", "--json")
    assert done.code == 6, done.err
    ended = json.loads(done.out)
    assert (ended["status"], sum(ended["error_codes"].values())) == ("expired", ended["request_counts"]["cancelled"])


def test_retry_of_a_job_whose_rows_all_have_answers(fleet: FleetBench) -> None:
    call(fleet, "submit", *job_of(fleet, "fine"), "--wait")
    retried = call(fleet, "retry", f"{fleet.prefix}/fine-out", "--json", "--wait")
    assert retried.code == 0
    assert json.loads(retried.out)["rows_retried"] == 0
    assert call(fleet, "retry", f"{fleet.prefix}/fine-out").out == "0\n"


def test_watch_all_ends_when_no_job_is_left(fleet: FleetBench) -> None:
    call(fleet, "submit", *job_of(fleet, "all"))
    watched = call(fleet, "watch", "--all", "--every", "0.2", "--json")
    assert watched.code == 0
    for line in watched.out.splitlines():
        assert [tier["tier"] for tier in json.loads(line)["tiers"]] == ["high", "normal", "low"]
    assert "no job is queued or in progress" in watched.err
    assert call(fleet, "watch", "--all", "job-1").code == 2


def test_a_broken_setting_is_exit_2(fleet: FleetBench) -> None:
    assert call(fleet, "status", DATABASE_URL="mysql://x").code == 2
    assert call(fleet, "status", NIGHTMILL_HOEM="x").code == 2


def test_a_watch_and_a_wait_outlive_a_restart_of_the_database(
    tmp_path: Path, postgres_url: str, postgres_server: Any
) -> None:
    fleet = FleetBench(tmp_path, {"DATABASE_URL": postgres_url, "NIGHTMILL_HOME": str(tmp_path)}, str(tmp_path))
    try:
        job_id = call(fleet, "submit", *job_of(fleet, "survive")).out.strip()
        with spawn(fleet, "watch", job_id, "--every", "0.2") as watching, spawn(fleet, "wait", job_id) as waiting:
            assert watching.stderr is not None
            assert waiting.stderr is not None
            watching.stderr.readline()
            waiting.stderr.readline()
            postgres_server.kill()
            postgres_server.start()
            fleet.start()
            _, shown = watching.communicate(timeout=120)
            waiting.communicate(timeout=120)
        assert (watching.returncode, waiting.returncode) == (0, 0), shown
        assert "completed  40/40 rows" in shown
        wait_until(lambda: fleet.store.job(job_id).status is JobStatus.COMPLETED, "the end")
    finally:
        fleet.close()


def test_a_broker_that_is_down_is_a_warning_and_the_job_runs(tmp_path: Path, postgres_url: str) -> None:
    environment = {
        "DATABASE_URL": postgres_url,
        "CELERY_BROKER_URL": "amqp://guest:secret@localhost:1//",
        "NIGHTMILL_HOME": str(tmp_path),
    }
    fleet = FleetBench(tmp_path, environment, str(tmp_path))
    try:
        submitted = call(fleet, "submit", *job_of(fleet, "down"))
        assert (submitted.code, submitted.out.count("\n")) == (0, 1)
        assert "warning: queued, but the broker could not be rung" in submitted.err
        assert "secret" not in submitted.err
        assert "every worker must see it" in submitted.err
        fleet.start(CELERY_BROKER_URL="")
        assert call(fleet, "wait", "--timeout", "2m").code == 0
    finally:
        fleet.close()


def test_a_job_from_bucket_to_bucket(tmp_path: Path, moto_s3: S3Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its output's uri, in each spelling; and everything that reads the parts."""
    environment = {"DATABASE_URL": f"sqlite:///{tmp_path}/nightmill.db", "NIGHTMILL_HOME": str(tmp_path), **moto_s3.env}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    fleet = FleetBench(tmp_path, environment, f"s3://{moto_s3.bucket}")
    output = f"s3://{moto_s3.bucket}/answers"
    try:
        fleet.start()
        source = fleet.write("prompts/a", ["10 20", "", "12 20"])
        submit = ["submit", source.rpartition("/")[0], "-o", output + "/", "--model", "fake", "--max-tokens", "4"]
        done = call(fleet, *submit, "--wait", "--json")
        assert done.code == 0, done.err
        job_id = json.loads(done.out)["id"]
        for reference in (output, output + "/", job_id):
            assert json.loads(call(fleet, "status", reference, "--json").out)["id"] == job_id
        assert call(fleet, "results", output).out == f"{output}\n"
        rows = [json.loads(line) for line in call(fleet, "results", output, "--limit", "9", "--json").out.splitlines()]
        assert [row["completion"] for row in rows] == [answer("10 20", 4), None, answer("12 20", 4)]
        (error,) = [json.loads(line) for line in call(fleet, "errors", output, "--json").out.splitlines()]
        assert (error["row_index"], error["error_code"]) == (1, "empty_prompt")
        good = tmp_path / "good.jsonl"
        assert call(fleet, "results", output, "--openai", str(good)).code == 0
        assert len(good.read_text().splitlines()) == 2
        with Client() as client:
            job = client.job(output)
            assert job.results(["completion"]) == job.dataset().to_table(columns=["completion"])
            assert job.errors().num_rows == 1
            assert next(job.iter_results()).num_rows == 3
        refused = call(fleet, *submit[:-1], "5")
        assert (refused.code, "max_tokens: 4 → 5" in refused.err) == (3, True)
        gone = call(fleet, "submit", f"s3://{moto_s3.bucket}/nothing/", "-o", f"{output}2", "--model", "fake")
        assert (gone.code, gone.out) == (3, "")
        assert "every worker must see it" not in done.err
    finally:
        fleet.close()
