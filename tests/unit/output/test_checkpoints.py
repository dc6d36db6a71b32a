import itertools
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nightmill.errors import RowErrorCode, StorageError
from nightmill.output import CheckpointReader, CheckpointWriter, read_checkpoints
from nightmill.records import Completion
from nightmill.storage import LocalStorage

STORAGE = LocalStorage()


def done(row: int, text: str = "t", **fields: Any) -> Completion:
    return Completion(row_index=row, custom_id=f"x#{row}", text=text, finish_reason="stop", **fields)


def failed(row: int, code: str = "null_prompt", message: str = "it is null") -> Completion:
    return Completion(row_index=row, custom_id=f"x#{row}", error_code=code, error_message=message)


def writer(folder: Path, attempt: int = 1, max_rows: int = 100) -> CheckpointWriter:
    return CheckpointWriter(STORAGE, str(folder), 7, attempt, max_rows=max_rows)


def read(folder: Path) -> dict[int, Completion]:
    return read_checkpoints(STORAGE, str(folder), 7)


texts = st.none() | st.text(max_size=20)
counts = st.none() | st.integers(0, 2**31 - 1)
completions = st.builds(
    Completion,
    row_index=st.integers(0, 2**62),
    custom_id=st.text(max_size=10),
    text=st.text(max_size=50),
    finish_reason=st.sampled_from(["stop", "length"]),
    prompt_tokens=counts,
    completion_tokens=counts,
    cached_tokens=counts,
    attempts=st.integers(1, 2**31 - 1),
    seed=st.none() | st.integers(0, 2**64 - 1),
    max_tokens_effective=counts,
    logprobs=texts,
) | st.builds(
    Completion,
    row_index=st.integers(0, 2**62),
    custom_id=st.text(max_size=10),
    error_code=st.sampled_from([code.value for code in RowErrorCode if not code.value.startswith("batch_")]),
    error_message=st.text(min_size=1, max_size=50),
)


@given(rows=st.lists(completions, max_size=20, unique_by=lambda c: c.row_index), max_rows=st.integers(1, 7))
@settings(max_examples=60, deadline=None)
def test_what_is_written_comes_back(
    rows: list[Completion], max_rows: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("ckpt")
    checkpoints = writer(folder, max_rows=max_rows)
    for row in rows:
        checkpoints.add(row)
    checkpoints.flush()
    clean = {row.row_index: replace(row, **{
        name: value.replace("\x00", "\ufffd")
        for name in ("custom_id", "text", "error_message", "logprobs")
        if (value := getattr(row, name)) is not None
    }) for row in rows}  # fmt: skip
    assert read(folder) == clean
    assert CheckpointReader(STORAGE, str(folder), 7).row_indices() == set(clean)


def test_rows_are_durable_when_flush_returns_and_not_before(tmp_path: Path) -> None:
    checkpoints = writer(tmp_path, max_rows=3)
    assert [checkpoints.add(done(row)) for row in range(4)] == [False, False, True, False]
    assert checkpoints.pending == 1
    assert set(read(tmp_path)) == {0, 1, 2}
    assert checkpoints.flush() == 1
    assert checkpoints.flush() == 0
    assert set(read(tmp_path)) == {0, 1, 2, 3}
    assert [Path(uri).relative_to(tmp_path).as_posix() for uri in checkpoints.files] == [
        "shard-00007/ckpt-0001-000001.parquet",
        "shard-00007/ckpt-0001-000002.parquet",
    ]


def test_first_row_wins_in_order_of_attempt_and_seq_as_numbers(tmp_path: Path) -> None:
    folder = tmp_path / "shard-00007"
    for attempt, seq in ((10, 1), (2, 11), (2, 9), (9999, 1), (12345, 1)):
        checkpoints = writer(tmp_path, attempt)
        checkpoints.add(done(0, f"{attempt}-{seq}"))
        checkpoints.add(done(attempt * 100 + seq))
        checkpoints.flush()
        Path(checkpoints.files[0]).rename(folder / f"ckpt-{attempt}-{seq}.parquet")
    rows = read(tmp_path)
    assert rows[0].text == "2-9"
    assert len(rows) == 6


def test_an_attempt_may_have_two_writers(tmp_path: Path) -> None:
    for row in (1, 2):
        checkpoints = writer(tmp_path)
        checkpoints.add(done(row))
        checkpoints.flush()
    assert set(read(tmp_path)) == {1, 2}


def test_the_reader_fixes_its_list_when_it_is_made(tmp_path: Path) -> None:
    zombie, mine = writer(tmp_path, 1), writer(tmp_path, 2)
    zombie.add(done(0, "durable"))
    zombie.flush()
    reader = CheckpointReader(STORAGE, str(tmp_path), 7)
    zombie.add(done(1, "late"))
    zombie.flush()
    mine.add(done(1, "mine"))
    mine.add(done(2, "mine"))
    mine.flush()
    assert {row: c.text for row, c in reader.read().items()} == {0: "durable"}
    reader.include(mine.files)
    reader.include(mine.files)
    assert {row: c.text for row, c in reader.read().items()} == {0: "durable", 1: "mine", 2: "mine"}
    assert len(reader.files) == 2


def damaged(kind: str, path: Path) -> None:
    data = path.read_bytes()
    if kind == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "pages":
        path.write_bytes(data[:4] + b"\xff" * 200 + data[204:])
    elif kind == "schema":
        pq.write_table(pa.table({"row_index": [1], "other": [2]}), path)
    elif kind == "gone":
        path.unlink()


@pytest.mark.parametrize("kind", ["truncated", "empty", "pages", "schema", "gone"])
def test_an_unreadable_file_is_skipped_with_a_warning(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = writer(tmp_path)
    for row in range(3):
        checkpoints.add(done(row, str(row) * 100))
        checkpoints.flush()
    reader = CheckpointReader(STORAGE, str(tmp_path), 7)
    damaged(kind, Path(checkpoints.files[1]))
    with caplog.at_level(logging.WARNING):
        indices = reader.row_indices()
    assert indices == {0, 2}
    assert checkpoints.files[1] in caplog.text
    assert set(reader.read()) == indices


def test_files_of_other_names_are_not_looked_at(tmp_path: Path) -> None:
    checkpoints = writer(tmp_path)
    checkpoints.add(done(0))
    checkpoints.flush()
    folder = tmp_path / "shard-00007"
    for name in ("ckpt-1-2.parquet.bak", "notes.txt", ".nightmill-ckpt-1-2.parquet-ab.tmp", "xckpt-1-2.parquet"):
        (folder / name).write_text("?")
    assert set(read(tmp_path)) == {0}


def test_a_failed_flush_keeps_its_rows_for_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = writer(tmp_path)
    checkpoints.add(done(0))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("nightmill.storage.local.os.fsync", full)
        with pytest.raises(StorageError, match="no space left"):
            checkpoints.flush()
    assert checkpoints.pending == 1
    assert read(tmp_path) == {}
    assert checkpoints.flush() == 1
    assert set(read(tmp_path)) == {0}


@pytest.mark.parametrize(
    "completion",
    [
        Completion(row_index=0, custom_id="a"),
        Completion(row_index=0, custom_id="a", text="t"),
        Completion(row_index=0, custom_id="a", finish_reason="stop"),
        replace(done(0), finish_reason="abort"),
        replace(done(0), error_code="engine_error", error_message="m"),
        replace(done(0), error_message=""),
        failed(0, code="nonsense"),
        failed(0, code=""),
        failed(0, message=""),
        failed(0, code="batch_cancelled"),
        failed(0, code="batch_expired"),
        replace(failed(0), text="half"),
    ],
)
def test_only_final_rows_are_taken(completion: Completion, tmp_path: Path) -> None:
    checkpoints = writer(tmp_path)
    with pytest.raises(ValueError):
        checkpoints.add(completion)
    assert checkpoints.pending == 0


def test_surrogates_of_a_model_are_replaced(tmp_path: Path) -> None:
    checkpoints = writer(tmp_path)
    checkpoints.add(done(0, "a\ud800b\x00"))
    checkpoints.flush()
    assert read(tmp_path)[0].text == "a\ufffdb\ufffd"


@given(
    rows=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), max_size=40),
    max_rows=st.integers(1, 5),
    crash_at=st.integers(0, 30),
)
@settings(max_examples=60, deadline=None)
def test_crash_anywhere_between_writes_loses_only_what_was_pending(
    rows: list[tuple[int, int]], max_rows: int, crash_at: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Attempts run one after another, some rows twice; the process dies after `crash_at` rows."""
    folder = tmp_path_factory.mktemp("crash")
    durable: dict[int, str] = {}
    count = 0
    for attempt, group in itertools.groupby(sorted(rows), key=lambda pair: pair[0]):
        checkpoints, pending = writer(folder, attempt, max_rows), []
        for _, row in group:
            if count == crash_at:
                break
            count += 1
            pending.append((row, f"{attempt}:{count}"))
            if checkpoints.add(done(row, pending[-1][1])):
                for index, text in pending:
                    durable.setdefault(index, text)
                pending = []
        # No flush: this attempt dies, and what was pending with it.
    assert {index: c.text for index, c in read(folder).items()} == durable
