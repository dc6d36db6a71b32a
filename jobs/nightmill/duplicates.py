"""Which custom_ids are there twice, over any number of rows, in bounded memory.

One pass writes a 64-bit hash and the position of each id to files on disk, split by hash; each file is sorted in
memory; rows whose hashes are equal are looked up again and compared exactly.
"""

import contextlib
import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from nightmill.errors import StorageError
from nightmill.reader import RowBatch, open_source, read_range
from nightmill.reader.many import Progress, map_files
from nightmill.records import JobSpec, ShardRange, SourceFile
from nightmill.rows.parse import custom_ids
from nightmill.storage import Storage

_RECORD = np.dtype([("hash", np.int64), ("row", np.int64)])
_ROWS_PER_BUCKET = 2_000_000
_SUSPECTS_AT_ONCE = 10_000


@dataclass(frozen=True, slots=True)
class DuplicateId:
    """Two rows with one id."""

    custom_id: str
    first: str  # "<file> row <n>"
    second: str


def find_duplicate_ids(
    sources: Sequence[SourceFile],
    spec: JobSpec,
    *,
    limit: int = 10,
    hash_id: Callable[[str], int] = hash,
    storage: Storage | None = None,
    progress: Progress | None = None,
) -> tuple[DuplicateId, ...]:
    """Find up to `limit` rows that repeat an earlier row's id, earliest first among those looked at.

    Ids that rows do not give themselves (`<file>#<row>`) are made unique; a job without an id column is not read.

    Raises:
        StorageError: an input cannot be read, or there is no room for 16 bytes a row in the temporary folder.
    """
    by_uri = {source.uri: source for source in sources if source.num_rows}
    have_ids = map_files(lambda uri: _has_ids(by_uri[uri], storage), list(by_uri))
    with_ids = [source for source, has in zip(by_uri.values(), have_ids, strict=True) if has]
    if not with_ids:
        return ()
    starts = np.cumsum([0, *(source.num_rows for source in with_ids)])
    with _disk_errors(), tempfile.TemporaryDirectory(prefix="nightmill-ids-") as folder:
        buckets = _Buckets(Path(folder), 1 + int(starts[-1]) // _ROWS_PER_BUCKET)
        with buckets:
            for done, (source, start) in enumerate(zip(with_ids, starts[:-1], strict=True), 1):
                for batch in _id_batches(source, storage):
                    hashes = np.fromiter(map(hash_id, custom_ids(batch, spec)), np.int64, batch.num_rows)
                    buckets.add(hashes, int(start) + batch.row_start)
                if progress is not None:
                    progress(done, len(with_ids))
        found: list[DuplicateId] = []
        for suspects in buckets.suspects():
            repeated = _compare(suspects, with_ids, starts, spec, storage)
            found.extend(itertools.islice(repeated, limit - len(found)))
            if len(found) >= limit:
                break
    return tuple(found)


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"looking for duplicate ids failed: {error}",
            hint="It needs 16 bytes a row in the temporary folder: point TMPDIR at a larger disk, or --no-check-ids.",
        ) from error


def _has_ids(source: SourceFile, storage: Storage | None) -> bool:
    with open_source(source.uri, storage) as file:
        return "custom_id" in file.schema.names


def _id_batches(source: SourceFile, storage: Storage | None, end: int | None = None) -> Iterator[RowBatch]:
    rows = source.num_rows if end is None else end
    whole = ShardRange(index=0, source_file=source.uri, row_start=0, row_end=rows)
    return read_range(whole, ["custom_id"], storage=storage)


class _Buckets:
    """Files of (hash, row) records; equal hashes land in one file."""

    def __init__(self, folder: Path, count: int) -> None:
        self._paths = [folder / f"{index}.bin" for index in range(count)]
        self._files: list[BinaryIO] = []

    def __enter__(self) -> "_Buckets":
        self._files = [path.open("wb") for path in self._paths]
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.close()

    def add(self, hashes: NDArray[np.int64], first_row: int) -> None:
        records = np.empty(len(hashes), _RECORD)
        records["hash"] = hashes
        records["row"] = np.arange(first_row, first_row + len(hashes))
        bucket = hashes % len(self._files)
        for index, file in enumerate(self._files):
            file.write(records[bucket == index].tobytes())

    def suspects(self) -> Iterator[NDArray[np.int64]]:
        """Rows whose hash is not theirs alone, in pieces that cut no group of equal hashes."""
        for path in self._paths:
            records = np.fromfile(path, _RECORD)
            records.sort(order=["hash", "row"])
            same = records["hash"][1:] == records["hash"][:-1]
            shared = np.zeros(len(records), bool)
            shared[1:] |= same
            shared[:-1] |= same
            hashes, rows = records["hash"][shared], records["row"][shared]
            start = 0
            while start < len(rows):
                end = min(start + _SUSPECTS_AT_ONCE, len(rows))
                end = int(np.searchsorted(hashes, hashes[end - 1], side="right"))
                yield rows[start:end]
                start = end


def _compare(
    suspects: NDArray[np.int64],
    sources: Sequence[SourceFile],
    starts: NDArray[np.int64],
    spec: JobSpec,
    storage: Storage | None,
) -> Iterator[DuplicateId]:
    seen: dict[str, str] = {}
    for custom_id, place in _look_up(np.sort(suspects), sources, starts, spec, storage):
        if custom_id in seen:
            yield DuplicateId(custom_id, seen[custom_id], place)
        else:
            seen[custom_id] = place


def _look_up(
    rows: NDArray[np.int64],
    sources: Sequence[SourceFile],
    starts: NDArray[np.int64],
    spec: JobSpec,
    storage: Storage | None,
) -> Iterator[tuple[str, str]]:
    """Ids and places of the rows, in their order."""
    for source, start in zip(sources, starts[:-1], strict=True):
        local = rows[(rows >= start) & (rows < start + source.num_rows)] - start
        if not len(local):
            continue
        for batch in _id_batches(source, storage, end=int(local[-1]) + 1):
            first, last = np.searchsorted(local, [batch.row_start, batch.row_start + batch.num_rows])
            if first == last:
                continue
            ids = custom_ids(batch, spec)
            for row in local[first:last].tolist():
                yield ids[row - batch.row_start], f"{source.uri} row {row}"
