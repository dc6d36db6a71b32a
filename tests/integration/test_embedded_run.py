"""A whole job in one process, with a fake model: order, schema, bad rows, budget, resume."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.integration.conftest import Bench

from nightmill.errors import OutputOccupiedError, SpecMismatchError, ValidationError
from nightmill.records import JobOptions
from nightmill.sampling import SamplingParams
from nightmill.states import JobStatus
from nightmill_worker.report import RunProgress, SilentReporter


def answers(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """What must not depend on how often a job was interrupted."""
    names = ("source_file", "row_index", "custom_id", "completion", "finish_reason", "error_code", "seed", "n")
    return [tuple(row[name] for name in names) for row in rows]


def test_every_row_comes_out_once_in_order(bench: Bench) -> None:
    bench.write(450, row_group_size=50, tags=[["a", str(i)] for i in range(450)])
    result = bench.run()
    rows = bench.rows()
    assert [row["row_index"] for row in rows] == list(range(450))
    assert [row["n"] for row in rows] == list(range(450))
    assert [row["tags"] for row in rows] == [["a", str(i)] for i in range(450)]
    assert all(row["error_code"] is None and row["finish_reason"] == "length" for row in rows)
    assert all(row["completion_tokens"] == 6 and row["model"] == "fake" for row in rows)
    assert result.job.status is JobStatus.COMPLETED
    assert (result.summary.rows_ok, result.summary.rows_failed) == (450, 0)
    assert result.summary.completion_tokens == 450 * 6
    assert len(list(bench.output.glob("part-*.parquet"))) == 5
    assert (bench.output / "_SUCCESS").exists()
    manifest = json.loads((bench.output / "_manifest.json").read_text())
    assert manifest["rows"]["completed"] == 450
    # Nothing of the work is left.
    assert [p.name for p in (bench.output / "_nightmill").rglob("*") if p.is_file()] == ["job.json"]


def test_process_and_thread_engines_give_the_same_output(bench: Bench) -> None:
    bench.write(150)
    bench.run(in_process=True, output=bench.path / "thread")
    bench.run(in_process=False, output=bench.path / "process")
    assert answers(bench.rows(bench.path / "thread")) == answers(bench.rows(bench.path / "process"))


def test_a_finished_job_is_not_run_again(bench: Bench) -> None:
    bench.write(120)
    first = bench.run()
    before = {p: p.stat() for p in bench.output.rglob("*") if p.is_file()}
    again = bench.run()
    assert again.job.job_id == first.job.job_id
    assert again.summary.steps == 0
    assert (again.summary.rows_ok, again.summary.rows_resumed, again.summary.rows_recomputed) == (120, 120, 0)
    assert {p: (s.st_mtime_ns, s.st_ino) for p, s in before.items()} == {
        p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in before
    }


@pytest.mark.parametrize(
    ("index", "prompt", "code"),
    [
        (500, " ".join(["7"] * 300), "context_length_exceeded"),
        (3, None, "null_prompt"),
        (4, "", "empty_prompt"),
        (5, "   ", "empty_prompt"),
    ],
)
def test_case_I001_I004_one_bad_row_costs_one_row(bench: Bench, index: int, prompt: str | None, code: str) -> None:
    prompts: list[str | None] = [f"{i % 900 + 2} 5" for i in range(1000)]
    prompts[index] = prompt
    bench.write(prompts)
    result = bench.run(options=JobOptions(shard_rows=400))
    rows = bench.rows()
    assert len(rows) == 1000
    assert [row["row_index"] for row in rows if row["error_code"]] == [index]
    assert rows[index]["error_code"] == code
    assert rows[index]["completion"] is None
    assert rows[index]["error_message"]
    assert result.job.status is JobStatus.COMPLETED
    assert (result.summary.rows_ok, result.summary.rows_failed) == (999, 1)


def test_case_I002_the_engine_never_sees_a_bad_row(bench: Bench) -> None:
    bench.write(["1 2", " ".join(["7"] * 500), "3 4", "5 6"])
    result = bench.run(in_process=False)
    assert [row["error_code"] for row in bench.rows()] == [None, "context_length_exceeded", None, None]
    assert result.summary.engine_deaths == 0


def test_every_kind_of_bad_row_beside_good_ones(bench: Bench) -> None:
    bench.write(
        [
            "1 2",
            None,
            "",
            "5 6",
            "5 6",
            "5 6",
            "\ud800 7".encode("utf-8", "surrogatepass").decode("utf-8", "replace"),
            "3\x004",
        ],
        sampling_params=[None, None, None, '{"temperatur": 1}', '{"max_tokens": 0}', "{", None, None],
    )
    bench.run()
    codes = [row["error_code"] for row in bench.rows()]
    assert codes == [None, "null_prompt", "empty_prompt", *["invalid_sampling_params"] * 3, None, None]
    assert "temperatur" in bench.rows()[3]["error_message"]


def test_case_I008_a_failed_row_keeps_its_columns(bench: Bench) -> None:
    bench.write(["", "1 2"], country=["NZ", "IS"], custom_id=["x", "y"])
    bench.run()
    row = bench.rows()[0]
    assert (row["country"], row["custom_id"], row["n"], row["error_code"]) == ("NZ", "x", 0, "empty_prompt")


def test_case_I016_finish_reason_is_there_exactly_where_error_code_is_not(bench: Bench) -> None:
    bench.write(["1 2", "", "3"])
    bench.run()
    for row in bench.rows():
        assert (row["finish_reason"] is None) == (row["error_code"] is not None)


def test_case_I046_rows_of_different_lengths_come_out_in_order(bench: Bench) -> None:
    limits = [json.dumps({"max_tokens": 1 + (i * 37) % 120}) for i in range(300)]
    bench.write(300, sampling_params=limits)
    bench.run()
    rows = bench.rows()
    assert [row["row_index"] for row in rows] == list(range(300))
    assert [row["completion_tokens"] for row in rows] == [1 + (i * 37) % 120 for i in range(300)]


def test_max_tokens_is_clamped_and_said_so_or_an_error_with_strict(bench: Bench) -> None:
    bench.write([" ".join(["7"] * 250), "1"])
    bench.run(sampling=SamplingParams(max_tokens=100))
    rows = bench.rows()
    assert (rows[0]["max_tokens_effective"], rows[0]["completion_tokens"]) == (6, 6)
    assert rows[1]["max_tokens_effective"] == 100
    bench.run(sampling=SamplingParams(max_tokens=100), strict=True, output=bench.path / "strict")
    rows = bench.rows(bench.path / "strict")
    assert [row["error_code"] for row in rows] == ["context_length_exceeded", None]


def test_case_I018_duplicate_custom_ids(bench: Bench) -> None:
    bench.write(["1", "2", "3"], custom_id=["a", "b", "a"])
    with pytest.raises(ValidationError, match=r"row 0.*row 2") as caught:
        bench.run()
    assert caught.value.exit_code == 3
    assert not bench.output.exists()
    bench.run(allow_duplicate_ids=True)
    assert [(row["custom_id"], row["row_index"]) for row in bench.rows()] == [("a", 0), ("b", 1), ("a", 2)]


def test_case_I026_a_folder_with_foreign_files_is_refused(bench: Bench) -> None:
    bench.write(10)
    bench.output.mkdir()
    (bench.output / "thesis.docx").write_text("mine")
    with pytest.raises(OutputOccupiedError, match=r"thesis\.docx") as caught:
        bench.run()
    assert caught.value.exit_code == 3
    assert [p.name for p in bench.output.rglob("*")] == ["thesis.docx"]


def test_a_changed_spec_is_refused_with_the_difference(bench: Bench) -> None:
    bench.write(10)
    bench.run()
    with pytest.raises(SpecMismatchError, match=r"temperature: 0\.0 → 0\.7") as caught:
        bench.run(sampling=SamplingParams(max_tokens=6, temperature=0.7))
    assert caught.value.exit_code == 3
    # What only changes the speed is no difference.
    assert bench.run(options=JobOptions(shard_rows=3)).summary.rows_resumed == 10


def test_case_I033_a_job_whose_rows_all_fail_is_complete_with_exit_5(bench: Bench) -> None:
    bench.write([""] * 9)
    result = bench.run()
    assert result.job.status is JobStatus.COMPLETED
    assert (result.summary.rows_ok, result.summary.rows_failed) == (0, 9)
    assert len(bench.rows()) == 9


def test_case_I006_the_error_budget_stops_the_job_and_keeps_what_is_finished(bench: Bench) -> None:
    prompts = [("" if i < 6 else "7 8 9") for i in range(1000)]
    bench.write(prompts)
    result = bench.run(options=JobOptions(shard_rows=100, max_failed_rows=5), fake='{"step_s": 0.005}')
    assert result.job.status is JobStatus.FAILED
    assert result.job.error_code == "error_budget_exceeded"
    rows = bench.rows()
    assert [row["row_index"] for row in rows] == list(range(1000))
    assert [row["error_code"] for row in rows[:6]] == ["empty_prompt"] * 6
    assert not (bench.output / "_SUCCESS").exists()
    counts = result.job.rows
    assert counts.completed + counts.failed + counts.cancelled == counts.total == 1000
    assert counts.cancelled > 0


def test_case_I007_shards_without_and_with_errors_have_one_schema(bench: Bench) -> None:
    bench.write([*["1 2"] * 100, *[""] * 100])
    bench.run()
    schemas = [pq.read_schema(part) for part in sorted(bench.output.glob("part-*.parquet"))]
    assert schemas[0].equals(schemas[1])
    assert pq.read_table(bench.output).num_rows == 200


class Watching(SilentReporter):
    """Records what it is told."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.seen: list[RunProgress] = []

    def phase(self, text: str) -> None:
        self.phases.append(text)

    def note(self, text: str) -> None:
        self.phases.append(text)

    def progress(self, progress: RunProgress) -> None:
        self.seen.append(progress)


def test_case_I053_no_barrier_at_a_shards_end(bench: Bench) -> None:
    # One long row at the end of the first shard: the shards after it run, and are done, meanwhile.
    limits = [json.dumps({"max_tokens": 240 if i == 49 else 4}) for i in range(200)]
    bench.write(200, sampling_params=limits)
    bench.run(options=JobOptions(shard_rows=50), fake='{"step_s": 0.004}')
    first, *others = (p.stat().st_mtime_ns for p in sorted(bench.output.glob("part-*.parquet")))
    assert len(others) == 3
    assert max(others) < first


def test_the_start_says_what_the_pool_is_sized_from(bench: Bench) -> None:
    bench.write(30)
    watching = Watching()
    bench.run(reporter=watching)
    said = "\n".join(watching.phases)
    assert "64 bytes of KV per token" in said
    assert "page pool 4,095 pages of 16 = 65,520 tokens" in said
    assert watching.seen[-1].rows_total == 30


@pytest.mark.parametrize("what", ["exit", "kill", "raise"])
def test_case_I062_a_poison_row_is_quarantined_and_its_shard_completes(bench: Bench, what: str, tmp_path: Path) -> None:
    deaths = tmp_path / "deaths"
    deaths.mkdir()
    prompts = ["7 8 9" if i != 77 else "7 999 9" for i in range(200)]
    bench.write(prompts)
    result = bench.run(in_process=False, fake=json.dumps({"traps": {"999": what}, "deaths_dir": str(deaths)}))
    rows = bench.rows()
    assert [row["row_index"] for row in rows] == list(range(200))
    failed = {row["row_index"]: row["error_code"] for row in rows if row["error_code"]}
    assert failed == {77: "engine_error" if what == "raise" else "quarantined"}
    assert result.summary.engine_deaths == len(list(deaths.iterdir())) <= 8 + 2 * (what == "kill")
    assert 0 < result.summary.rows_recomputed <= 24 * result.summary.engine_deaths


def test_openai_batch_files_are_an_input(bench: Bench) -> None:
    lines = [
        {
            "custom_id": f"id-{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": f"{i + 3} 4", "max_tokens": 3},
        }
        for i in range(5)
    ]
    source = bench.path / "batch.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    bench.run(inputs=(str(source),))
    rows = bench.rows()
    assert [row["custom_id"] for row in rows] == [f"id-{i}" for i in range(5)]
    assert all(row["completion_tokens"] == 3 for row in rows)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda b: None, "in.parquet"),
        (lambda b: b.input.write_bytes(b"PAR1 this is no parquet PAR1"), "in.parquet"),
        (lambda b: pq.write_table(pa.table({"text": ["a"]}), b.input), "prompt"),
        (lambda b: pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), b.input), "no rows"),
        (lambda b: pq.write_table(pa.table({"prompt": [1, 2]}), b.input), "prompt"),
    ],
    ids=["missing", "not parquet", "no prompt column", "no rows", "wrong type"],
)
def test_an_input_that_does_not_fit_is_refused_by_name(bench: Bench, make: Any, words: str) -> None:
    make(bench)
    with pytest.raises(Exception, match=words) as caught:
        bench.run()
    assert getattr(caught.value, "exit_code", None) in (1, 3)
    assert not bench.output.exists()
