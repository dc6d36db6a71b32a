"""`nightmill run s3://… -o s3://…`: the same guarantees where there are no files, and where the store is no good."""

import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from tests.integration.conftest import Bench
from tests.integration.s3_bench import S3Bench
from tests.integration.test_embedded_run import answers
from tests.integration.test_kill_and_resume import wait_until
from tests.services.servers import S3Bucket

from deploy.native.faulty_s3 import FaultyS3

ROWS = 600
SLOW = '{"step_s": 0.01}'


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Any) -> list[tuple[Any, ...]]:
    """What the same rows give on a local disk."""
    bench = Bench(tmp_path_factory.mktemp("local"), tokenizer_dir)
    bench.write(ROWS)
    bench.run()
    return answers(bench.rows())


@pytest.fixture
def s3(bench: Bench, moto_s3: S3Bucket) -> Iterator[S3Bench]:
    with S3Bench(bench, moto_s3).closing() as made:
        yield made


@pytest.mark.parametrize("wanted", [1, pytest.param(4, marks=pytest.mark.long)])
def test_case_I022_kill_9_and_run_again_on_s3(s3: S3Bench, wanted: int, expected: list[tuple[Any, ...]]) -> None:
    command = s3.run_arguments(s3.put_rows("in.parquet", ROWS), fake=SLOW)
    with s3.bench.spawn(*command) as process:
        wait_until(lambda: len(s3.parts()) >= wanted, process)
        process.kill()
    before = s3.parts()
    again = s3.summary(*command)
    assert answers(s3.rows()) == expected
    assert {name: s3.parts()[name] for name in before} == before
    assert again["rows_ok"] == ROWS
    assert again["rows_resumed"] >= 100 * len(before)
    assert s3.names() == ["_SUCCESS", "_manifest.json", "_nightmill/job.json", *sorted(s3.parts())]


LONG = [pytest.param(name, marks=pytest.mark.long) for name in ("after_checkpoint_put", "after_commit", "in_finalize")]


@pytest.mark.parametrize("name", ["after_part_put", *LONG])
def test_case_I023_die_in_each_crash_window_on_s3(s3: S3Bench, name: str, expected: list[tuple[Any, ...]]) -> None:
    command = s3.run_arguments(s3.put_rows("in.parquet", ROWS), more=["--in-process"])
    assert s3.call(*command, NIGHTMILL_FAILPOINT=name).code == -signal.SIGKILL
    before = s3.parts()
    s3.summary(*command)
    assert answers(s3.rows()) == expected
    assert {part: s3.parts()[part] for part in before} == before


def test_a_store_without_conditions_shows_only_what_was_committed(s3: S3Bench, expected: list[tuple[Any, ...]]) -> None:
    command = s3.run_arguments(s3.put_rows("in.parquet", ROWS), more=["--in-process"])
    with FaultyS3(s3.bucket.endpoint.url, ignores_conditions=True) as proxy:
        s3.use(proxy.url)
        for failpoint, attempts in (("after_part_put:2", True), ("after_commit:2", True)):
            assert s3.call(*command, NIGHTMILL_FAILPOINT=failpoint).code == -signal.SIGKILL
            hidden = [key for key in s3.names("team/out/_nightmill/") if "/part-" in key]
            assert bool(hidden) == attempts
            status = json.loads(s3.call("status", s3.output, "--json").out)
            assert len(s3.parts()) <= status["request_counts"]["completed"] / 100
        s3.summary(*command)
    assert answers(s3.rows()) == expected
    assert s3.names() == [
        "_SUCCESS",
        "_manifest.json",
        "_nightmill/job.json",
        *(f"part-0000{n}.parquet" for n in range(6)),
    ]


def test_a_stormy_slow_store_costs_time_and_no_row(s3: S3Bench, expected: list[tuple[Any, ...]]) -> None:
    with FaultyS3(s3.bucket.endpoint.url, storm=0.2, latency_s=0.02) as proxy:
        s3.use(proxy.url)
        ended = s3.call(*s3.run_arguments(s3.put_rows("in.parquet", ROWS)))
    assert ended.code == 0, ended.err
    assert answers(s3.rows()) == expected
    assert sum(request.fault is not None for request in proxy.requests) > 10
    assert len({request.path for request in proxy.seen("PUT", "part-")}) == 6


def test_an_input_overwritten_while_the_job_runs_is_told(s3: S3Bench) -> None:
    uri = s3.put_rows("in.parquet", ROWS)
    with s3.bench.spawn(*s3.run_arguments(uri, fake='{"step_s": 0.03}')) as process:
        wait_until(lambda: any("inflight" in key for key in s3.names()), process)
        s3.put_rows("in.parquet", [f"{i % 9 + 2}" for i in range(ROWS)])
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    for word in ("in.parquet was overwritten: its etag is", "Put the old file back and run again"):
        assert word in err
    assert "Traceback" not in err
    # Put back, it goes on from where it was.
    s3.put_rows("in.parquet", ROWS)
    assert s3.summary(*s3.run_arguments(uri, fake='{"step_s": 0.03}'))["rows_ok"] == ROWS


def test_inputs_of_two_stores_in_one_job(s3: S3Bench) -> None:
    local = s3.bench.write(["7 8"])
    line = {"method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "5 6 7"}}
    lines = [json.dumps(line | {"custom_id": f"q{n}"}).encode() for n in range(70)]
    remote = s3.put("data/x.parquet", local.read_bytes())
    s3.summary(*s3.run_arguments(remote, str(local), more=["--in-process"]))
    assert [row["source_file"] for row in s3.rows()] == [remote, str(local)]
    jsonl = s3.put("lines.jsonl", b"\n".join(lines))
    command = s3.run_arguments(jsonl, more=["--in-process"])
    command[command.index("-o") + 1] = f"{s3.root}/out-2"
    assert s3.summary(*command)["rows_ok"] == 70
    ended = s3.call("results", f"{s3.root}/out-2", "--openai", "-")
    assert [json.loads(text)["custom_id"] for text in ended.out.splitlines()] == [f"q{n}" for n in range(70)]
    assert (
        json.loads(s3.call("results", s3.output, "--json").out)["parts"][0]["uri"] == f"{s3.output}/part-00000.parquet"
    )
