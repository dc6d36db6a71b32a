"""OpenAI batch files (JSON lines) as a Source with four columns: `custom_id`, `method`, `url`, `body`.

A row is a line that is not blank. One pass over the newlines makes a sparse index of byte offsets, so that a shard
starts reading where it starts.
"""

import bisect
import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, BinaryIO, Self

import pyarrow as pa

from nightmill.errors import StorageError, ValidationError
from nightmill.reader.source import BATCH_BYTES, MAX_BATCH_ROWS, OPENAI_FORM_KEY, Extent, reading
from nightmill.reader.text import valid_unicode
from nightmill.storage import Storage, open_storage

OPENAI_SCHEMA = pa.schema(
    [
        ("custom_id", pa.string()),
        ("method", pa.string()),
        ("url", pa.string()),
        ("body", pa.large_string()),  # JSON; of a line that cannot be read: the line itself, the others null
    ],
    metadata={OPENAI_FORM_KEY: b"1"},
)

_ROWS_PER_MARK = 64
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class _Mark:
    row: int
    offset: int  # byte where the row's line starts


class JsonlSource:
    """An open file of JSON lines. Opening it scans it once in this process, for line ends."""

    def __init__(self, uri: str, storage: Storage | None = None) -> None:
        self._uri = uri
        self._storage = storage or open_storage(uri)
        info = self._storage.stat(uri)
        if info is None:
            raise StorageError(f"cannot read {uri}: there is no such file")
        self._etag = info.etag
        self._marks = _index(self._storage, uri, info.etag)

    @property
    def uri(self) -> str:
        """Where it is."""
        return self._uri

    @property
    def schema(self) -> pa.Schema:
        """The same four columns for every file."""
        return OPENAI_SCHEMA

    @property
    def extents(self) -> list[Extent]:
        """One for each mark of the index."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return [Extent(num_rows=b.row - a.row, num_bytes=b.offset - a.offset) for a, b in pairs]

    def batches(self, row_start: int, row_end: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Read lines from the mark before `row_start`."""
        schema = OPENAI_SCHEMA if columns is None else pa.schema([OPENAI_SCHEMA.field(name) for name in columns])
        schema = schema.with_metadata(OPENAI_SCHEMA.metadata)
        mark = self._marks[bisect.bisect_right(self._marks, row_start, key=lambda m: m.row) - 1]
        rows: list[dict[str, str | None]] = []
        num_bytes = 0
        with reading(self._uri), self._storage.open_input(self._uri, etag=self._etag) as file:
            file.seek(mark.offset)
            for row, line in enumerate(_lines(file), start=mark.row):
                if row >= row_end:
                    break
                if row < row_start:
                    continue
                rows.append(_row(line))
                num_bytes += len(line)
                if len(rows) == MAX_BATCH_ROWS or num_bytes >= BATCH_BYTES:
                    yield pa.RecordBatch.from_pylist(rows, schema=schema)
                    rows, num_bytes = [], 0
            if rows:
                yield pa.RecordBatch.from_pylist(rows, schema=schema)

    def check_form(self) -> None:
        """Look at the first row only: a file of other lines is a mistake, one bad line is not.

        Raises:
            ValidationError: the first row is a JSON object and no request.
        """
        for batch in self.batches(0, 1):
            (row,) = batch.to_pylist()
            if row["url"] is None and row["body"] is None:
                raise ValidationError(
                    f"{self._uri} is not in OpenAI batch form: its first line has neither url nor body",
                    hint='Each line must be {"custom_id": …, "method": "POST", "url": "/v1/chat/completions", '
                    '"body": {…}}. Convert other data to Parquet.',
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


@functools.lru_cache(maxsize=64)
def _index(storage: Storage, uri: str, etag: str) -> tuple[_Mark, ...]:
    """Marks at every _ROWS_PER_MARK rows, the last one behind the last row."""
    marks, row, offset = [], 0, 0
    with reading(uri), storage.open_input(uri, etag=etag) as file:
        for line in _raw_lines(file):
            if not _is_blank(line):
                if row % _ROWS_PER_MARK == 0:
                    marks.append(_Mark(row, offset))
                row += 1
            offset += len(line)
    if not marks or marks[-1].row != row:
        marks.append(_Mark(row, offset))
    return tuple(marks)


def _raw_lines(file: pa.NativeFile) -> Iterator[bytes]:
    """Lines with their line ends; NativeFile.readline is not to be had for every kind of file."""
    stream: BinaryIO = file
    head: list[bytes] = []  # pieces of a line longer than a read
    while piece := stream.read(2**20):
        *lines, rest = piece.split(b"\n")
        if lines:
            yield b"".join((*head, lines[0], b"\n"))
            head.clear()
            for line in lines[1:]:
                yield line + b"\n"
        if rest:
            head.append(rest)
    if head:
        yield b"".join(head)


def _lines(file: pa.NativeFile) -> Iterator[bytes]:
    return (line for line in _raw_lines(file) if not _is_blank(line))


def _is_blank(line: bytes) -> bool:
    return not line.removeprefix(_BOM).strip()


def _row(line: bytes) -> dict[str, str | None]:
    text = line.removeprefix(_BOM).strip().decode("utf-8", "replace")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        return {"custom_id": None, "method": None, "url": None, "body": text}
    body = value.get("body")
    return {
        "custom_id": _id_text(value.get("custom_id")),
        "method": _text(value.get("method")),
        "url": _text(value.get("url")),
        "body": None if body is None else valid_unicode(json.dumps(body, ensure_ascii=False)),
    }


def _id_text(value: Any) -> str | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return _text(value)


def _text(value: Any) -> str | None:
    return valid_unicode(value) if isinstance(value, str) else None
