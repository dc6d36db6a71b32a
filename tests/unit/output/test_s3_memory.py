"""Memory is bounded on S3 too: by what is read ahead, not by the size of a column (case I012)."""

import os
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.contract.s3_stores import use_store
from tests.services.servers import S3Bucket
from tests.unit.output.test_output_memory import MIB, SCRIPT, script, write_column

from nightmill.storage.s3_connection import S3Connection
from nightmill.storage.s3_reader import ObjectReader, Range
from nightmill.storage.s3_settings import S3Settings


def uploaded(bucket: S3Bucket, tmp_path: Path, rows: int) -> str:
    path = tmp_path / "big.parquet"
    write_column(path, rows=rows, row_bytes=MIB)
    client = bucket.endpoint.client()
    client.upload_file(str(path), bucket.bucket, "big.parquet")
    client.close()
    path.unlink()
    return f"s3://{bucket.bucket}/big.parquet"


def test_case_I012_a_column_on_s3_larger_than_memory_allows(
    ceph_s3: S3Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_store(monkeypatch, ceph_s3)
    uri = uploaded(ceph_s3, tmp_path, rows=200)
    before, read, wrote, completed = script(SCRIPT, uri, tmp_path / "out")
    assert completed == 200
    assert read - before < 150, "reading 200 MiB"
    assert wrote - before < 300, "writing 200 MiB"


@pytest.mark.long
def test_case_I012_a_column_on_s3_beyond_two_gigabytes(
    ceph_s3: S3Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_store(monkeypatch, ceph_s3)
    uri = uploaded(ceph_s3, tmp_path, rows=2500)
    _, _, wrote, completed = script(SCRIPT, uri, tmp_path / "out")
    assert completed == 2500
    assert wrote < 1000


class Bytes(ObjectReader):
    """A reader of bytes in memory that counts what it is asked for."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.asked: list[int] = []
        super().__init__(S3Connection(S3Settings()), "s3://b/x")

    def _get(self, span: str, expected: int | None = None) -> Range:
        first, last = span.removeprefix("bytes=").split("-")
        start = int(first) if first else max(len(self.data) - int(last), 0)
        piece = self.data[start : int(last) + 1] if first else self.data[start:]
        self.asked.append(len(piece))
        return Range(start, piece, len(self.data), "etag")

    @property
    def held(self) -> int:
        return sum(map(len, self._windows.values()))


moves = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1 << 14), st.integers(0, 5000)), max_size=60)


@given(size=st.integers(0, 1 << 14), moves=moves)
def test_any_reads_in_any_order_give_the_objects_bytes(size: int, moves: list[tuple[int, int, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "TAIL_BYTES": 100,
            "MIN_WINDOW_BYTES": 64,
            "MAX_WINDOW_BYTES": 512,
            "MAX_HELD_BYTES": 2000,
        }.items():
            patch.setattr(f"nightmill.storage.s3_reader.{name}", value)
        data = random.Random(size).randbytes(size)
        reader = Bytes(data)
        assert (reader.seek(0, os.SEEK_END), reader.seek(0)) == (size, 0)
        streams = [0, size // 3, size // 2, size]
        for stream, jump, length in moves:
            start = streams[stream] if jump % 2 else jump
            reader.seek(start)
            expected = data[start : start + length]
            assert reader.read(length) == expected
            streams[stream] = reader.tell()
            assert reader.tell() == start + len(expected)
            assert reader.held <= 2000
        assert max(reader.asked) <= max(512, 100)
        reader.seek(0)
        assert reader.read() == data
        reader.close()


def test_a_front_to_back_read_asks_little_more_than_once_for_each_byte() -> None:
    reader = Bytes(random.Random(0).randbytes(20 * MIB))
    while reader.read(MIB):
        pass
    assert sum(reader.asked) == 20 * MIB
    assert len(reader.asked) <= 9
