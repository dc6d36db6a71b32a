"""The commands that look at a store, called as click calls them. The job they look at is a real one."""

import json
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from tests.integration.conftest import Bench
from tests.integration.fake_model import make_tokenizer

from nightmill.cli.main import COMMANDS, cli
from nightmill.errors import ExitCode
from nightmill.janitor import Janitor, JanitorReport
from nightmill.records import JobOptions
from nightmill.store import Store
from nightmill_worker.cli.run_options import SwapSpace
from nightmill_worker.report import SilentReporter


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A finished job of 30 rows, two of them bad."""
    path = tmp_path_factory.mktemp("finished")
    bench = Bench(path, make_tokenizer(path / "tokenizer"))
    prompts: list[str | None] = [f"{i + 2} 3" for i in range(30)]
    prompts[4], prompts[9] = None, ""
    bench.write(prompts, row_group_size=10, custom_id=[f"id-{i}" for i in range(30)])
    bench.run()
    return bench


def call(bench: Bench, *arguments: str) -> Result:
    environment = {"NIGHTMILL_HOME": str(bench.path / "home"), "HOME": str(bench.path)}
    return CliRunner().invoke(cli, list(arguments), env=environment)


def data(bench: Bench, *arguments: str) -> Any:
    result = call(bench, *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("name", [*COMMANDS, "run"])
def test_every_command_has_help_with_an_example(name: str) -> None:
    result = CliRunner().invoke(cli, [name, "--help"])
    assert result.exit_code == 0
    assert "Example" in result.stdout
    assert f"nightmill {name}" in result.stdout


def test_the_group_lists_every_command_with_a_line() -> None:
    result = CliRunner().invoke(cli, ["--help"])
    assert result.exit_code == 0
    for name in [*COMMANDS, "run", "bench"]:
        assert any(line.split()[:1] == [name] and len(line.split()) > 2 for line in result.stdout.splitlines())


def test_every_option_is_explained_or_explains_itself() -> None:
    command = cli.get_command(click.Context(cli), "run")
    assert command is not None
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            assert parameter.help or parameter.show_default, parameter.name


def test_status_by_id_by_output_and_of_the_last_job(finished: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    last = data(finished, "status")
    assert last["status"] == "completed"
    assert last["request_counts"] == {"total": 30, "completed": 28, "failed": 2, "cancelled": 0}
    assert last["error_codes"] == {"empty_prompt": 1, "null_prompt": 1}
    assert last["object"] == "batch"
    assert last["usage"]["output_tokens"] == 28 * 6
    assert data(finished, "status", last["id"]) == last
    assert data(finished, "status", str(finished.output)) == last
    monkeypatch.chdir(finished.path)
    assert data(finished, "status", "out") == last
    text = call(finished, "status").stdout
    for words in ("completed", "30 of 30 (100.0 %)", "empty_prompt 1", str(finished.output)):
        assert words in text


def test_status_says_where_to_look_when_a_job_cannot_be_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path, make_tokenizer(tmp_path / "tokenizer"))
    pq.write_table(pa.table({"prompt": ["2 3"] * 4}), tmp_path / "in.parquet")
    submitted = call(bench, "submit", str(tmp_path / "in.parquet"), "-o", str(tmp_path / "out"), "--model", "any")
    assert submitted.exit_code == 0, submitted.stderr
    assert "janitor" not in call(bench, "status").stderr
    with closing(Store(f"sqlite:///{tmp_path / 'home/nightmill.db'}")) as store:
        store.cancel(submitted.stdout.strip())
    assert "janitor" not in call(bench, "status").stderr, "it has only just been cancelled"
    monkeypatch.setattr("nightmill.cli.status.CLOSING_TAKES", timedelta(0))
    for words in ([], ["--json"]):
        assert (
            "shards wait to be closed; where that lasts, `nightmill janitor --once`"
            in call(bench, "status", *words).stderr
        )
    (tmp_path / "out/part-00000.parquet").write_bytes(b"somebody else's")
    swept = call(bench, "janitor", "--once", "--json")
    assert (swept.exit_code, "was not written by this job" in swept.stdout) == (1, True)


def test_one_sweep_waits_for_its_turn(finished: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = [JanitorReport(granted=False), JanitorReport(granted=False), JanitorReport(granted=True, num_expired=1)]
    monkeypatch.setattr(Janitor, "sweep", lambda self: reports.pop(0))
    assert call(finished, "janitor", "--once").stderr == "expired leases: 1\n"
    reports += [JanitorReport(granted=False)]
    monkeypatch.setattr("nightmill.cli.janitor.OTHERS_S", 0.0)
    assert call(finished, "janitor", "--once").stderr == "another janitor is at work\n"


def test_an_unknown_job_is_exit_4_and_says_what_to_do(finished: Bench) -> None:
    for arguments in (["status", "job-nope"], ["cancel", "nowhere/"], ["errors", "job-nope"], ["results", "/nope"]):
        result = call(finished, *arguments)
        assert result.exit_code == ExitCode.NOT_FOUND
        assert "nightmill list" in result.stderr
        assert result.stdout == ""


@pytest.mark.parametrize("reference", ["", "\udcff", "a/\udcff"])
def test_what_can_be_no_jobs_name_is_exit_4(finished: Bench, reference: str) -> None:
    result = call(finished, "status", reference)
    assert result.exit_code == ExitCode.NOT_FOUND
    assert "no job has" in result.stderr


def test_list_takes_any_limit(finished: Bench) -> None:
    assert len(data(finished, "list", "--limit", "9" * 30)) == 1


def test_a_store_without_jobs_is_exit_4(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["status"], env={"NIGHTMILL_HOME": str(tmp_path / "empty")})
    assert result.exit_code == ExitCode.NOT_FOUND
    assert "no jobs" in result.stderr


def test_list(finished: Bench) -> None:
    assert [job["status"] for job in data(finished, "list")] == ["completed"]
    assert data(finished, "list", "--status", "failed") == []
    header, line = call(finished, "list").stdout.splitlines()
    assert header.split()[:3] == ["JOB", "STATUS", "ROWS"]
    assert line.split()[1:5] == ["completed", "30", "28", "2"]


def test_errors_lists_rows_with_their_place(finished: Bench) -> None:
    result = call(finished, "errors", "--json")
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(r["row_index"], r["custom_id"], r["error_code"]) for r in rows] == [
        (4, "id-4", "null_prompt"),
        (9, "id-9", "empty_prompt"),
    ]
    assert all(r["source_file"] == "in.parquet" and r["error_message"] for r in rows)
    only = call(finished, "errors", "--code", "empty_prompt").stdout
    assert "id-9" in only
    assert "id-4" not in only
    assert len(call(finished, "errors", "--limit", "1", "--json").stdout.splitlines()) == 1
    assert data(finished, "errors", "--counts") == {"empty_prompt": 1, "null_prompt": 1}


def test_results_prints_the_folder_alone(finished: Bench) -> None:
    assert call(finished, "results").stdout == f"{finished.output}\n"
    listing = data(finished, "results")
    assert sum(part["rows"] for part in listing["parts"]) == 30
    assert all(Path(part["uri"]).stat().st_size == part["bytes"] for part in listing["parts"])


def test_results_shows_the_first_rows_in_order(finished: Bench) -> None:
    rows = [json.loads(line) for line in call(finished, "results", "--limit", "6", "--json").stdout.splitlines()]
    assert [row["custom_id"] for row in rows] == [f"id-{i}" for i in range(6)]
    assert [row["error_code"] for row in rows] == [None] * 4 + ["null_prompt", None]
    assert all((row["completion"] is None) == (row["error_code"] is not None) for row in rows)
    assert len(call(finished, "results", "--limit", "99", "--json").stdout.splitlines()) == 30
    text = call(finished, "results", "--limit", "5").stdout
    assert "id-3" in text
    assert "null_prompt" in text


def test_results_as_openai_files(finished: Bench, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    result = call(finished, "results", "--openai", str(good), "--openai-errors", str(bad))
    assert result.exit_code == 0
    lines = [json.loads(line) for line in good.read_text().splitlines()]
    assert len(lines) == 28
    assert lines[0]["custom_id"] == "id-0"
    assert lines[0]["response"]["body"]["choices"][0]["finish_reason"] == "length"
    assert [json.loads(line)["error"]["code"] for line in bad.read_text().splitlines()] == [
        "null_prompt",
        "empty_prompt",
    ]


def test_results_into_a_folder_that_is_not_there(finished: Bench, tmp_path: Path) -> None:
    result = call(finished, "results", "--openai", str(tmp_path / "no" / "x.jsonl"))
    assert result.exit_code == ExitCode.FAILED
    assert "cannot write" in result.stderr


def test_cancel_of_a_finished_job_says_so(finished: Bench) -> None:
    result = call(finished, "cancel", str(finished.output))
    assert result.exit_code == ExitCode.FAILED
    assert "completed" in result.stderr


def test_validate_tells_what_will_fail(finished: Bench) -> None:
    report = data(finished, "validate", str(finished.input))
    assert report["ok"] is True
    assert (report["rows"], report["error_codes"]) == (30, {"empty_prompt": 1, "null_prompt": 1})
    text = call(finished, "validate", str(finished.input))
    assert "null_prompt" in text.stdout + text.stderr


def test_case_I018_validate_names_duplicate_ids(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b"], "custom_id": ["x", "x"]}), path)
    result = CliRunner().invoke(cli, ["validate", str(path)])
    assert result.exit_code == ExitCode.VALIDATION
    assert "'x'" in result.stderr
    assert "row 0" in result.stderr
    assert "row 1" in result.stderr


def test_validate_refuses_a_missing_column_by_name(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"promt": ["a"]}), path)
    result = CliRunner().invoke(cli, ["validate", str(path)])
    assert result.exit_code == ExitCode.VALIDATION
    assert "promt" in result.stderr


def test_doctor_checks_and_fails_with_what_to_do(tmp_path: Path) -> None:
    environment = {"NIGHTMILL_HOME": str(tmp_path / "home"), "NIGHTMILL_CACHE": str(tmp_path / "cache")}
    result = CliRunner().invoke(cli, ["doctor", "--json"], env=environment)
    found = {f["name"]: f for f in json.loads(result.stdout)}
    assert result.exit_code == (1 if any(f["level"] == "fail" for f in found.values()) else 0)
    assert {"python", "cpu", "memory", "compiler", "kernels", "torch", "store", "store disk", "model cache"} <= set(
        found
    )
    assert found["store"]["level"] == "ok"
    (tmp_path / "file").touch()
    broken = CliRunner().invoke(cli, ["doctor", "--json"], env={"NIGHTMILL_HOME": str(tmp_path / "file" / "home")})
    store = next(f for f in json.loads(broken.stdout) if f["name"] == "store")
    assert (broken.exit_code, store["level"]) == (1, "fail")
    assert store["todo"]


def doctor_says(name: str, **environment: str) -> dict[str, str]:
    found = json.loads(CliRunner().invoke(cli, ["doctor", "--json"], env=environment).stdout)
    return next(finding for finding in found if finding["name"] == name)


def test_doctor_knows_an_instruction_set_that_this_processor_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nightmill.cli.doctor._cpu_flags", lambda: frozenset({"avx2"}))
    home = str(tmp_path)
    assert doctor_says("instruction set", NIGHTMILL_HOME=home, NIGHTMILL_CPU_ISA="avx512")["level"] == "fail"
    assert doctor_says("instruction set", NIGHTMILL_HOME=home, NIGHTMILL_CPU_ISA="AVX2")["level"] == "ok"
    assert doctor_says("instruction set", NIGHTMILL_HOME=home, NIGHTMILL_CPU_ISA="portable")["level"] == "ok"


def test_doctor_says_that_a_cache_others_may_write_to_is_not_used(tmp_path: Path) -> None:
    environment = {"NIGHTMILL_HOME": str(tmp_path), "NIGHTMILL_CACHE": str(tmp_path)}
    assert doctor_says("kernels", **environment)["level"] == "ok"
    folder = tmp_path / "kernels"
    folder.mkdir(mode=0o700)
    assert doctor_says("kernels", **environment)["level"] == "ok"
    folder.chmod(0o777)
    finding = doctor_says("kernels", **environment)
    assert (finding["level"], str(folder) in finding["todo"]) == ("warn", True)


def test_doctor_names_a_bad_setting(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["doctor"], env={"NIGHTMILL_HOEM": "x", "NIGHTMILL_HOME": str(tmp_path)})
    assert result.exit_code == 1
    assert "NIGHTMILL_HOEM" in result.stdout


@pytest.mark.parametrize(
    "arguments", [["run"], ["run", "in"], ["frobnicate"], ["status", "--nope"], ["run", "--tier-share"]]
)
def test_usage_errors_are_exit_2(arguments: list[str]) -> None:
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == ExitCode.USAGE


@pytest.mark.parametrize("flag", ["--quantization", "--gpu-memory-utilization"])
def test_a_value_that_is_none_is_refused(flag: str) -> None:
    result = CliRunner().invoke(cli, ["run", "in", "-o", "out", "--model", "demo", flag, "x"])
    assert result.exit_code == ExitCode.USAGE
    assert flag in result.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--temperature", "-1"], "temperature must be between"),
        (["--min-tokens", "9", "--max-tokens", "3"], "min_tokens"),
        (["--system-prompt", "@/nowhere.txt"], "/nowhere.txt"),
        (["--expires-in", "soon"], "not a duration"),
        (["--kv-cache-memory-bytes", "lots"], "not a size"),
        (["--swap-space", "-1"], "not a size"),
        (["--tier-share", "urgent=9"], "tier shares read like high=80"),
        (["--kv-cache-memory-bytes", "9" * 400], "not a size"),
        (["--expires-in", "9" * 400 + "d"], "not a duration"),
        (["--stop", ""], "empty string"),
        (["--stop", "\udcff"], "--stop is not valid UTF-8"),
        (["--system-prompt", "\udcff"], "--system-prompt is not valid UTF-8"),
        (["--stop-token-ids", "-1"], "stop_token_ids"),
    ],
)
def test_bad_values_are_usage_errors_with_the_reason(flags: list[str], words: str) -> None:
    result = CliRunner().invoke(cli, ["run", "in", "-o", "out", "--model", "demo", *flags])
    assert result.exit_code == ExitCode.USAGE
    assert words in result.stderr


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("0.0", 0), ("4", 4 << 30), ("0.5", 1 << 29), ("512M", 512 << 20), ("2GiB", 2 << 30)]
)
def test_swap_space_is_in_gib_unless_it_says(text: str, size: int) -> None:
    assert SwapSpace().convert(text, None, None) == size


def test_a_model_that_does_not_exist_is_exit_3(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": ["a"]}), path)
    arguments = ["run", str(path), "-o", str(tmp_path / "out"), "--model", str(tmp_path / "no-model")]
    result = CliRunner().invoke(cli, arguments, env={"NIGHTMILL_HOME": str(tmp_path / "home")})
    assert result.exit_code == ExitCode.VALIDATION
    assert "no-model" in result.stderr
    assert result.stdout == ""
    assert not (tmp_path / "out").exists()


def test_rows_without_an_id_of_their_own_are_shown_by_place(tmp_path: Path) -> None:
    bench = Bench(tmp_path, make_tokenizer(tmp_path / "tokenizer"))
    bench.write(["5 6", None], custom_id=pa.nulls(2, pa.string()))
    bench.run()
    (row,) = [json.loads(line) for line in call(bench, "errors", str(bench.output), "--json").stdout.splitlines()]
    assert row["custom_id"] == "in.parquet#1"
    first = json.loads(call(bench, "results", str(bench.output), "--limit", "1", "--json").stdout)
    assert first["custom_id"] == "in.parquet#0"


def test_a_bug_is_told_in_words_and_with_its_stack_on_demand(
    finished: Bench, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a wheel came off")

    monkeypatch.setattr("nightmill.cli.status.find_job", broken)
    result = call(finished, "status")
    assert result.exit_code == ExitCode.FAILED
    assert "RuntimeError: a wheel came off" in result.stderr
    assert "NIGHTMILL_LOG_LEVEL=debug" in result.stderr
    assert "Traceback" not in result.stderr
    monkeypatch.setenv("NIGHTMILL_LOG_LEVEL", "debug")
    assert "Traceback" in call(finished, "status").stderr


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (OSError(28, "No space left"), 1)])
def test_interrupts_and_disk_errors_are_told_in_words(
    finished: Bench, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    def broken(*_: object) -> None:
        raise error

    monkeypatch.setattr("nightmill.cli.status.find_job", broken)
    result = call(finished, "status")
    assert result.exit_code == code
    assert ("No space left" if code == 1 else "interrupted") in result.stderr
    assert "Traceback" not in result.stderr


def test_a_resumed_run_says_which_options_change_nothing(finished: Bench) -> None:
    class Notes(SilentReporter):
        def __init__(self) -> None:
            self.notes: list[str] = []

        def note(self, text: str) -> None:
            self.notes.append(text)

    reporter = Notes()
    finished.run(options=JobOptions(shard_rows=100), reporter=reporter)
    assert reporter.notes == []
    finished.run(options=JobOptions(shard_rows=7), reporter=reporter)
    assert [note for note in reporter.notes if "--shard-rows 7 changes nothing" in note]
