import errno
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.unit.output.output_jobs import DIGEST, STORAGE, SmallJob, answer
from tests.unit.rows.row_inputs import DEBIAN, make_spec, write

import nightmill.output.part
import nightmill.output.part_rows
from nightmill.errors import OutputOccupiedError, RowErrorCode, StorageError
from nightmill.output import OutputFolder, Unanswered, find_part
from nightmill.records import Completion, RowCounts, ShardRange, TokenCounts
from nightmill.rows import output_schema
from nightmill.sampling import SamplingParams
from nightmill.seeds import request_seed
from nightmill.storage import LocalStorage


def job_of(folder: Path, data: dict[str, Any], *, options: dict[str, Any] | None = None, **spec: Any) -> SmallJob:
    path = write(folder / "in" / "x.parquet", data, **(options or {}))
    return SmallJob(make_spec(path, output=folder / "out", **spec))


MIXED = {
    "id": [10, 11, 12, 13],
    "prompt": ["a", "", None, "d"],
    "country": ["fr", None, "de", "it"],
    "tags": [["x", None], [], None, ["y"]],
}


def test_a_part_holds_source_columns_and_ours(tmp_path: Path) -> None:
    job = job_of(tmp_path, MIXED)
    (shard,) = job.shards
    part = job.part(shard)
    table = pq.read_table(part.uri)
    assert table.schema.equals(output_schema(job.source_schema, job.spec))
    assert table.select(list(MIXED)).equals(pq.read_table(job.spec.inputs[0]))
    assert table.drop_columns(list(MIXED)).to_pylist() == [
        {
            "custom_id": f"x.parquet#{row}",
            "row_index": row,
            "source_file": "x.parquet",
            "completion": f"answer to {'ad'[row > 0]}",
            "finish_reason": "stop",
            "prompt_tokens": 3,
            "completion_tokens": 4,
            "cached_tokens": 1,
            "error_code": None,
            "error_message": None,
            "attempts": 1,
            "model": "fake",
            "seed": request_seed(0, "x.parquet", row),
            "max_tokens_effective": 256,
        }
        if row in (0, 3)
        else {
            "custom_id": f"x.parquet#{row}",
            "row_index": row,
            "source_file": "x.parquet",
            "completion": None,
            "finish_reason": None,
            "prompt_tokens": None,
            "completion_tokens": None,
            "cached_tokens": None,
            "error_code": ["empty_prompt", "null_prompt"][row - 1],
            "error_message": ["the prompt is empty", "the prompt is null"][row - 1],
            "attempts": 1,
            "model": "fake",
            "seed": None,
            "max_tokens_effective": None,
        }
        for row in range(4)
    ]
    assert part.rows == RowCounts(total=4, completed=2, failed=2)
    assert part.tokens == TokenCounts(prompt=6, completion=8, cached=2)
    assert part.error_codes == {"empty_prompt": 1, "null_prompt": 1}
    assert (part.bytes, part.adopted) == (Path(part.uri).stat().st_size, False)


def test_case_I008_error_rows_keep_their_source_columns(tmp_path: Path) -> None:
    job = job_of(tmp_path, {"id": [7], "country": ["fr"], "prompt": [""]})
    (row,) = pq.read_table(job.part(job.shards[0]).uri).to_pylist()
    assert (row["id"], row["country"], row["prompt"], row["error_code"]) == (7, "fr", "", "empty_prompt")


def test_case_I007_one_schema_with_and_without_errors(tmp_path: Path) -> None:
    job = job_of(tmp_path, {"prompt": ["a"] * 5 + [""] * 5}, options={"row_group_size": 5})
    job = replace(job, shard_rows=5)
    parts = [job.part(shard) for shard in job.shards]
    assert [part.error_codes for part in parts] == [{}, {"empty_prompt": 5}]
    schemas = [pq.read_schema(part.uri) for part in parts]
    assert schemas[0].equals(schemas[1], check_metadata=True)
    assert pq.read_table(job.folder.root).num_rows == 10


def test_case_I016_finish_reason_is_there_exactly_for_completions(tmp_path: Path) -> None:
    job = job_of(tmp_path, MIXED)
    rows = pq.read_table(job.part(job.shards[0]).uri).to_pylist()
    assert all((row["finish_reason"] is None) == (row["error_code"] is not None) for row in rows)
    assert all(row["error_code"] != "" and row["error_message"] != "" for row in rows)


def test_case_I046_order_is_the_inputs_whatever_order_rows_finish_in(tmp_path: Path) -> None:
    job = replace(
        job_of(tmp_path, {"prompt": [str(n) for n in range(500)]}, options={"row_group_size": 90}), shard_rows=90
    )
    for shard in reversed(job.shards):
        job.part(shard, list(reversed(job.completions(shard))))
    for shard in job.shards:
        indices = pq.read_table(job.folder.part(shard.index)).column("row_index").to_pylist()
        assert indices == list(range(shard.row_start, shard.row_end))


def test_case_I045_rows_join_back_by_id(tmp_path: Path) -> None:
    data = {"custom_id": [f"u{n}" for n in range(50)], "prompt": [f"p{n}" for n in range(50)]}
    job = replace(job_of(tmp_path, data, options={"row_group_size": 9}), shard_rows=9)
    job.run()
    joined = pq.read_table(job.folder.root).join(pq.read_table(job.spec.inputs[0]), "custom_id", right_suffix="_in")
    assert joined.num_rows == 50
    assert all(row["completion"] == f"answer to {row['prompt_in']}" for row in joined.to_pylist())


@pytest.mark.parametrize("ids", [["a", None], [5, None]])
def test_own_ids_stay_as_they_are(ids: list[Any], tmp_path: Path) -> None:
    job = job_of(tmp_path, {"prompt": ["p", "q"], "custom_id": ids})
    table = pq.read_table(job.part(job.shards[0]).uri)
    assert table.schema.names.count("custom_id") == 1
    assert table.column("custom_id").to_pylist() == ids


def test_prefix_and_column_name(tmp_path: Path) -> None:
    data = {"prompt": ["p"], "custom_id": ["a"], "model": ["mine"], "nm_x": [1]}
    job = job_of(tmp_path, data, output_prefix="nm_", output_column="text")
    (row,) = pq.read_table(job.part(job.shards[0]).uri).to_pylist()
    assert (row["custom_id"], row["nm_custom_id"], row["model"], row["nm_model"]) == ("a", "a", "mine", "fake")
    assert row["nm_text"] == "answer to p"


def test_logprobs_when_asked(tmp_path: Path) -> None:
    job = job_of(tmp_path, {"prompt": ["p"]}, sampling=SamplingParams(logprobs=1))
    rows = job.completions(job.shards[0], lambda row: answer(row, logprobs='{"content": []}'))
    (row,) = pq.read_table(job.part(job.shards[0], rows).uri).to_pylist()
    assert row["logprobs"] == '{"content": []}'


def test_seeds_above_int64_wrap(tmp_path: Path) -> None:
    job = job_of(tmp_path, {"prompt": ["p"], "sampling_params": ['{"seed": 18446744073709551615}']})
    (row,) = pq.read_table(job.part(job.shards[0]).uri).to_pylist()
    assert row["seed"] == -1


def test_real_rows_stay_equal(tmp_path: Path) -> None:
    job = SmallJob(make_spec(DEBIAN, output=tmp_path / "out", prompt_column="description"), shard_rows=500)
    job.run()
    source = pq.read_table(DEBIAN)
    table = pq.read_table(tmp_path / "out")
    assert table.select(source.schema.names).equals(source)
    assert table.column("row_index").to_pylist() == list(range(2000))


def test_several_files_of_different_widths(tmp_path: Path) -> None:
    write(tmp_path / "in" / "1.parquet", {"prompt": ["a"], "meta": pa.nulls(1)})
    write(tmp_path / "in" / "2.parquet", {"meta": [{"k": 1}], "prompt": pa.array(["b"], pa.large_string())})
    job = SmallJob(make_spec(tmp_path / "in", output=tmp_path / "out"))
    job.run()
    table = pq.read_table(tmp_path / "out")
    assert table.select(["prompt", "meta", "source_file", "row_index"]).to_pylist() == [
        {"prompt": "a", "meta": None, "source_file": "1.parquet", "row_index": 0},
        {"prompt": "b", "meta": {"k": 1}, "source_file": "2.parquet", "row_index": 0},
    ]


def test_output_of_one_job_is_input_of_the_next(tmp_path: Path) -> None:
    first = job_of(tmp_path, {"prompt": ["a", "b"]})
    first.run()
    second = SmallJob(
        make_spec(first.spec.output, output=tmp_path / "out2", prompt_column="completion", output_prefix="r2_"), "job-2"
    )
    part = second.part(second.shards[0])
    assert find_part(STORAGE, second.folder, second.shards[0], DIGEST) == replace(part, adopted=True)
    assert pq.read_table(part.uri).column("r2_completion").to_pylist() == [
        "answer to answer to a", "answer to answer to b"
    ]  # fmt: skip


# What must never be published.


def test_a_missing_row_is_never_published(tmp_path: Path) -> None:
    job = job_of(tmp_path, MIXED)
    rows = {row.row_index: row for row in job.completions(job.shards[0])}
    del rows[3]
    with pytest.raises(StorageError, match=r"row 3 of .* has no completion"):
        job.part(job.shards[0], rows)
    assert STORAGE.list(job.folder.root) == []


def test_a_changed_source_is_told(tmp_path: Path) -> None:
    data = {"prompt": ["a", "b"], "custom_id": ["u1", "u2"]}
    job = job_of(tmp_path, data)
    rows = job.completions(job.shards[0])
    write(Path(job.spec.inputs[0]), {"prompt": ["a", "b"], "custom_id": ["u2", "u1"]})
    with pytest.raises(StorageError, match=r"row 0 .* has the id 'u2', but was answered as 'u1'"):
        job.part(job.shards[0], rows)
    assert STORAGE.list(job.folder.root) == []


@pytest.mark.parametrize("fault", ["short", "order", "both"])
def test_a_part_that_came_out_wrong_is_never_published(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(tmp_path, MIXED)
    real = nightmill.output.part.PartRows.tables

    def faulty(self: Any, schema: pa.Schema) -> Any:
        for table in real(self, schema):
            if fault == "short":
                yield table.slice(0, 3)
            elif fault == "order":
                yield table.take([1, 0, 2, 3])
            else:
                position = table.schema.get_field_index("error_code")
                yield table.set_column(position, schema.field(position), pa.array(["x"] * 4, pa.string()))

    monkeypatch.setattr(nightmill.output.part.PartRows, "tables", faulty)
    with pytest.raises(StorageError, match="was not written"):
        job.part(job.shards[0])
    assert STORAGE.list(job.folder.root) == []


def test_a_part_whose_schema_came_out_otherwise_is_never_published(tmp_path: Path) -> None:
    job = job_of(tmp_path, MIXED)
    schema = output_schema(job.source_schema, job.spec)
    with STORAGE.stage(job.folder.part(0)) as staged:
        pq.write_table(schema.empty_table().drop_columns("tags"), staged.file)
        with pytest.raises(StorageError, match="its schema came out as"):
            nightmill.output.part._verify(staged, job.shards[0], schema, job.spec)


def test_a_full_disk_publishes_nothing_and_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(tmp_path, MIXED)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("nightmill.storage.local.os.fsync", full)
        with pytest.raises(StorageError, match=r"(?s)part-00000\.parquet.*no space left.*resumes"):
            job.part(job.shards[0])
    assert STORAGE.list(job.folder.root) == []
    assert job.part(job.shards[0]).rows.completed == 2


# A part that stands already.


def test_case_I023_a_part_written_before_a_crash_is_adopted_with_its_own_counts(tmp_path: Path) -> None:
    job = job_of(tmp_path, MIXED)
    (shard,) = job.shards
    first = job.part(shard)
    data = Path(first.uri).read_bytes()
    again = job.part(shard, [answer_nothing(row) for row in job.completions(shard)])
    assert again == replace(first, adopted=True)
    assert Path(first.uri).read_bytes() == data


def answer_nothing(row: Completion) -> Completion:
    return Completion(row_index=row.row_index, custom_id=row.custom_id, error_code="engine_error", error_message="m")


def test_adoption_needs_neither_source_nor_completions(tmp_path: Path) -> None:
    job = job_of(tmp_path, MIXED)
    first = job.part(job.shards[0])
    Path(job.spec.inputs[0]).unlink()
    assert job.part(job.shards[0], {}) == replace(first, adopted=True)


def test_a_part_of_another_job_shard_or_spec_is_refused(tmp_path: Path) -> None:
    job = job_of(tmp_path, MIXED)
    (shard,) = job.shards
    part = job.part(shard)
    data = Path(part.uri).read_bytes()
    others = [
        lambda: replace(job, job_id="job-2").part(shard),
        lambda: job.part(shard, digest="other"),
        lambda: find_part(STORAGE, job.folder, shard_at(shard, 1, part.uri, job.folder), DIGEST),
    ]
    for other in others:
        with pytest.raises(OutputOccupiedError, match="was not written by this job"):
            other()
    assert Path(part.uri).read_bytes() == data


def shard_at(shard: ShardRange, index: int, uri: str, folder: OutputFolder) -> ShardRange:
    Path(folder.part(index)).write_bytes(Path(uri).read_bytes())
    return replace(shard, index=index)


@pytest.mark.parametrize("data", [b"", b"PAR1", b"hello"])
def test_a_file_of_the_parts_name_is_never_overwritten(data: bytes, tmp_path: Path) -> None:
    job = job_of(tmp_path, MIXED)
    path = Path(job.folder.part(0))
    path.parent.mkdir()
    path.write_bytes(data)
    with pytest.raises(OutputOccupiedError, match=r"part-00000\.parquet"):
        job.part(job.shards[0])
    assert path.read_bytes() == data


def test_a_race_for_one_part_has_one_winner_and_all_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A zombie and its successor publish at the same time: both end with the part that stands."""
    job = job_of(tmp_path, MIXED)
    (shard,) = job.shards
    barrier, parts = threading.Barrier(4), []
    real = nightmill.output.part._verify

    def together(*arguments: Any) -> None:
        real(*arguments)
        barrier.wait()

    monkeypatch.setattr(nightmill.output.part, "_verify", together)
    threads = [threading.Thread(target=lambda: parts.append(job.part(shard))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(part.adopted for part in parts) == [False, True, True, True]
    assert len({part.etag for part in parts}) == 1
    assert [info.uri for info in STORAGE.list(job.folder.root)] == [parts[0].uri]


# Closers.


@pytest.mark.parametrize(
    ("code", "counts"),
    [
        (RowErrorCode.BATCH_CANCELLED, RowCounts(total=4, completed=1, failed=1, cancelled=2)),
        (RowErrorCode.BATCH_EXPIRED, RowCounts(total=4, completed=1, failed=1, cancelled=2)),
        (RowErrorCode.ENGINE_ERROR, RowCounts(total=4, completed=1, failed=3)),
    ],
)
def test_a_closer_accounts_for_every_row(code: RowErrorCode, counts: RowCounts, tmp_path: Path) -> None:
    job = job_of(tmp_path, MIXED)
    (shard,) = job.shards
    rows = {row.row_index: row for row in job.completions(shard) if row.row_index < 2}
    part = job.part(shard, rows, unanswered=Unanswered(code=code, message="closed"))
    assert part.rows == counts
    table = pq.read_table(part.uri).to_pylist()
    assert [row["error_code"] for row in table] == [None, "empty_prompt", code.value, code.value]
    assert [row["finish_reason"] for row in table] == ["stop", None, None, None]


# Form.


def test_row_groups_are_bounded_and_bytes_depend_on_the_rows_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nightmill.output.part_rows, "ROW_GROUP_BYTES", 100_000)
    monkeypatch.setattr("nightmill.reader.parquet.BATCH_BYTES", 20_000)
    data = {"prompt": [f"{n} " * 200 for n in range(1000)]}
    files = []
    for name in ("one", "two"):
        job = job_of(tmp_path / name, data)
        files.append(Path(job.part(job.shards[0]).uri))
    assert files[0].read_bytes() == files[1].read_bytes()
    metadata = pq.read_metadata(files[0])
    assert metadata.num_row_groups > 3
    assert max(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)) < 250_000


def test_identity_and_counts_stand_in_the_file(tmp_path: Path) -> None:
    job = job_of(tmp_path, MIXED)
    metadata = pq.read_metadata(job.part(job.shards[0]).uri).metadata
    assert metadata[b"nightmill.job_id"] == b"job-1"
    assert metadata[b"nightmill.shard_index"] == b"0"
    assert metadata[b"nightmill.spec_digest"] == DIGEST.encode()
    assert json.loads(metadata[b"nightmill.counts"])["rows"]["total"] == 4


def test_storage_of_the_source_is_the_one_given(tmp_path: Path) -> None:
    job = job_of(tmp_path, MIXED)
    assert isinstance(STORAGE, LocalStorage)
    assert job.part(job.shards[0]).rows.total == 4
