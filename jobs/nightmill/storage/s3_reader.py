"""An object as a file that is read in ranges, with read-ahead in bounded memory.

Parquet reads a few columns side by side, each in steps; JSON lines go front to back. So a handful of windows are kept,
each growing while it is read on from its end.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nightmill.errors import StorageError
from nightmill.storage.location import bucket_and_key
from nightmill.storage.positioned import PositionedReader
from nightmill.storage.protocol import ObjectInfo, changed
from nightmill.storage.s3_connection import S3Connection
from nightmill.storage.s3_errors import S3Error, ShortBodyError

if TYPE_CHECKING:
    import pyarrow as pa

TAIL_BYTES = 64 * 2**10  # the first request: a Parquet footer, or all of a small object
MIN_WINDOW_BYTES = 256 * 2**10
MAX_WINDOW_BYTES = 4 * 2**20
MAX_HELD_BYTES = 16 * 2**20  # in all windows of one open object


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes as they came back."""

    start: int
    data: bytes
    object_bytes: int
    etag: str

    @property
    def end(self) -> int:
        """First byte behind it."""
        return self.start + len(self.data)


def open_object(connection: S3Connection, uri: str, etag: str | None) -> "pa.NativeFile":
    """Open for ranged reads.

    Raises:
        SourceChangedError: `etag` is given and is not the object's.
        S3Error: it is missing or cannot be read.
    """
    import pyarrow as pa

    return pa.PythonFile(ObjectReader(connection, uri, etag), mode="r")


class ObjectReader(PositionedReader):
    """A read-only file. Every request asks for the one version that was opened."""

    def __init__(self, connection: S3Connection, uri: str, etag: str | None = None) -> None:
        super().__init__()
        self._connection = connection
        self._uri = uri
        self._etag = etag
        self._position = 0
        self._windows: OrderedDict[int, bytes] = OrderedDict()  # by their start; the one used last is last
        tail = self._get(f"bytes=-{TAIL_BYTES}")
        self._etag = tail.etag
        self._tail = tail
        self._size = tail.object_bytes

    @property
    def info(self) -> ObjectInfo:
        """What was opened."""
        return ObjectInfo(uri=self._uri, size_bytes=self._size, etag=self._etag or "")

    def read(self, size: int = -1) -> bytes:
        """Exactly `size` bytes, or up to the end of the object."""
        end = self._size if size is None or size < 0 else min(self._size, self._position + size)
        pieces = []
        while self._position < end:
            piece = self._piece(self._position, end)
            if not piece:
                raise StorageError(f"{self._uri} has {self._size:,} bytes, but none came from {self._position:,} on")
            pieces.append(piece)
            self._position += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def readinto(self, buffer: Any) -> int:
        """As io wants it."""
        view = memoryview(buffer).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Let go of what is held."""
        self._windows.clear()
        super().close()

    def _piece(self, start: int, end: int) -> bytes:
        """At least one of the bytes [start, end), from what is held or with one request."""
        tail = self._tail
        if start >= tail.start:
            return tail.data[start - tail.start : end - tail.start]
        for first, data in self._windows.items():
            if first <= start < first + len(data):
                self._windows.move_to_end(first)
                return data[start - first : end - first]
        return self._fetch(start, end)[: end - start]

    def _fetch(self, start: int, end: int) -> bytes:
        before = next((first for first, data in self._windows.items() if first + len(data) == start), None)
        # Read on from the end of a window: the next one is twice as long, as far as the others leave room.
        grown = 0 if before is None else 2 * len(self._windows.pop(before))
        room = MAX_HELD_BYTES // (len(self._windows) + 1)
        length = min(max(end - start, grown, MIN_WINDOW_BYTES), max(min(room, MAX_WINDOW_BYTES), MIN_WINDOW_BYTES))
        stop = min(start + length, self._tail.start)
        found = self._get(f"bytes={start}-{stop - 1}", expected=stop - start)
        data = found.data[start - found.start :]
        self._windows[start] = data
        while sum(map(len, self._windows.values())) > MAX_HELD_BYTES:
            self._windows.popitem(last=False)
        return data

    def _get(self, span: str, expected: int | None = None) -> Range:
        bucket, key = bucket_and_key(self._uri)
        condition = {} if self._etag is None else {"IfMatch": f'"{self._etag}"'}

        def request(client: Any) -> Range:
            answer = client.get_object(Bucket=bucket, Key=key, Range=span, **condition)
            with answer["Body"] as body:
                if "ContentRange" not in answer and answer["ContentLength"] > TAIL_BYTES:
                    raise StorageError(
                        f"cannot read {self._uri}: {self._connection.settings.where} sends whole objects only",
                        hint="nightmill reads in ranges: is there a proxy in between that drops the Range header?",
                    )
                return _range(answer, body.read(), expected)

        try:
            found = self._connection.call("read", self._uri, request)
        except S3Error as error:
            if error.http_status == 416:
                return self._empty()
            if error.http_status == 412 or (error.http_status == 404 and self._etag is not None):
                raise self._changed() from error
            raise
        if self._etag is not None and found.etag != self._etag:  # a store that does not look at the condition
            raise self._changed()
        return found

    def _empty(self) -> Range:
        """No byte to ask for: S3 refuses a range of an empty object."""
        bucket, key = bucket_and_key(self._uri)
        head = self._connection.call("read", self._uri, lambda client: client.head_object(Bucket=bucket, Key=key))
        etag = plain_etag(head["ETag"])
        if head["ContentLength"] or self._etag not in (None, etag):
            raise changed(self._uri, expected=self._etag or "", found=etag)
        return Range(0, b"", 0, etag)

    def _changed(self) -> Exception:
        bucket, key = bucket_and_key(self._uri)
        try:
            head = self._connection.call("read", self._uri, lambda client: client.head_object(Bucket=bucket, Key=key))
        except S3Error as error:
            if error.http_status != 404:
                return error
            return changed(self._uri, expected=self._etag or "", found=None)
        return changed(self._uri, expected=self._etag or "", found=plain_etag(head["ETag"]))


def plain_etag(value: str) -> str:
    """Without its quotes: answers to PUT, HEAD and LIST spell it differently."""
    return value.strip('"')


def _range(answer: Mapping[str, Any], data: bytes, expected: int | None) -> Range:
    etag = plain_etag(answer.get("ETag", ""))
    span = answer.get("ContentRange")  # "bytes 100-199/1000"
    if not span:  # a store that sends the whole object whatever was asked for
        return Range(0, data, len(data), etag)
    bounds, _, total = span.removeprefix("bytes ").partition("/")
    start, _, last = bounds.partition("-")
    wanted = int(last) - int(start) + 1 if expected is None else expected
    if len(data) != wanted:
        raise ShortBodyError(f"{len(data):,} of {wanted:,} bytes came")
    return Range(int(start), data, int(total), etag)
