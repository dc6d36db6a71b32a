import json
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.rows.row_inputs import DEBIAN, make_spec, write

from nightmill.errors import StorageError
from nightmill.reader import num_rows, open_source, read_range, read_shard
from nightmill.reader.source import BATCH_BYTES
from nightmill.records import ShardRange


def whole(path: Path, start: int, end: int) -> ShardRange:
    return ShardRange(index=0, source_file=str(path), row_start=start, row_end=end)


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    table = {"n": list(range(5000)), "a.b": ["x"] * 5000, "a": [{"b": i} for i in range(5000)]}
    return write(tmp_path_factory.mktemp("numbered") / "n.parquet", table, row_group_size=700)


@given(st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_range_comes_back_exactly(numbered: Path, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, 4999))
    end = data.draw(st.integers(start + 1, 5000))
    rows = []
    for batch in read_range(whole(numbered, start, end), ["n"]):
        assert batch.row_start == start + len(rows)
        assert batch.columns.schema.names == ["n"]
        rows.extend(batch.columns.column("n").to_pylist())
    assert rows == list(range(start, end))


def test_columns_come_in_the_order_asked_for_and_no_other(numbered: Path) -> None:
    (batch, *_) = read_range(whole(numbered, 0, 10), ["a", "n"])
    assert batch.columns.schema.names == ["a", "n"]
    (batch, *_) = read_range(whole(numbered, 0, 10))
    assert batch.columns.schema.names == ["n", "a.b", "a"]


def test_only_needed_columns_are_fed() -> None:
    spec = make_spec(DEBIAN, prompt_column="description")
    for batch in read_shard(whole(DEBIAN, 0, 100), spec):
        assert batch.columns.schema.names == ["description"]


def test_batches_are_bounded_in_bytes(tmp_path: Path) -> None:
    path = write(tmp_path / "big.parquet", {"prompt": [str(i % 10) * 2**20 for i in range(64)]}, use_dictionary=False)
    sizes = [batch.columns.nbytes for batch in read_range(whole(path, 0, 64))]
    assert sum(sizes) > 64 * 2**20
    assert max(sizes) < 2 * BATCH_BYTES


def test_a_file_that_shrank_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"prompt": ["a"] * 5})
    with pytest.raises(StorageError, match="has 5 rows, but had at least 9"):
        list(read_range(whole(path, 0, 9)))


def test_damaged_pages_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"prompt": [str(i) for i in range(10_000)]}, use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[100:20_000] = b"\xff" * 19_900
    path.write_bytes(data)
    with pytest.raises(StorageError, match=r"cannot read .*x\.parquet"):
        list(read_range(whole(path, 0, 10_000)))


def test_the_file_is_closed_when_the_stream_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    real = pa.OSFile

    def recording(*arguments: object) -> object:
        opened.append(real(*arguments))
        return opened[-1]

    monkeypatch.setattr(pa, "OSFile", recording)
    path = write(tmp_path / "x.parquet", {"prompt": ["a"] * 3000})
    stream = read_range(whole(path, 0, 3000))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert opened
    assert all(file.closed for file in opened)


LINES = [
    {"custom_id": f"r{i}", "method": "POST", "url": "/v1/chat/completions", "body": {"i": i, "t": "é\n" * (i % 7)}}
    for i in range(500)
]


def test_jsonl_rows_are_lines_that_are_not_blank(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    text = "\ufeff" + "\n\n  \r\n".join(json.dumps(line, ensure_ascii=False) for line in LINES) + "\r\n\n"
    path.write_bytes(text.encode())
    with open_source(str(path)) as source:
        assert num_rows(source) == len(LINES)
    for start, end in [(0, 500), (63, 65), (64, 128), (499, 500), (130, 131)]:
        rows = [row for batch in read_range(whole(path, start, end)) for row in batch.columns.to_pylist()]
        assert [json.loads(row["body"]) for row in rows] == [line["body"] for line in LINES[start:end]]
        assert [row["custom_id"] for row in rows] == [line["custom_id"] for line in LINES[start:end]]


def test_jsonl_lines_longer_than_a_read(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    lines = [{"custom_id": str(i), "body": {"t": str(i) * size}} for i, size in enumerate([3_000_000, 1, 2_100_000])]
    path.write_text("\n".join(map(json.dumps, lines)))
    rows = [row for batch in read_range(whole(path, 0, 3)) for row in batch.columns.to_pylist()]
    assert [json.loads(row["body"]) for row in rows] == [line["body"] for line in lines]


def test_jsonl_is_scanned_again_when_it_changed(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    for count in (3, 5):
        path.write_text('{"custom_id":"a","body":{}}\n' * count)
        with open_source(str(path)) as source:
            assert num_rows(source) == count


def test_jsonl_that_is_no_request_keeps_its_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"custom_id": 7, "body": {"t": "\\ud800 \xff"}}\n{broken\n[1, 2]\n' + b"[" * 100_000 + b"\n")
    (batch,) = read_range(whole(path, 0, 4))
    rows = batch.columns.to_pylist()
    assert rows[0]["custom_id"] == "7"
    assert json.loads(rows[0]["body"]) == {"t": "\ufffd \ufffd"}
    assert [row["body"][:7] for row in rows[1:]] == ["{broken", "[1, 2]", "[[[[[[["]
    assert all(row["custom_id"] is None for row in rows[1:])
