"""Durable rows of an unfinished shard: small Parquet files that a later attempt starts from.

`<work>/shard-00007/ckpt-<attempt>-<seq>.parquet`. Files are read in the order (attempt, seq) and the first row wins, so
that what one attempt has made durable is never replaced by another's.
"""

import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nightmill.errors import RowErrorCode, StorageError
from nightmill.failpoint import failpoint
from nightmill.output.folder import shard_folder
from nightmill.reader.text import sanitized
from nightmill.records import Completion
from nightmill.storage import ObjectExistsError, Storage

log = logging.getLogger(__name__)

CHECKPOINT_SCHEMA = pa.schema(
    [
        pa.field("row_index", pa.int64(), nullable=False),
        pa.field("custom_id", pa.string(), nullable=False),
        ("text", pa.large_string()),
        ("finish_reason", pa.string()),
        ("prompt_tokens", pa.int32()),
        ("completion_tokens", pa.int32()),
        ("cached_tokens", pa.int32()),
        ("error_code", pa.string()),
        ("error_message", pa.string()),
        pa.field("attempts", pa.int32(), nullable=False),
        ("seed", pa.uint64()),
        ("max_tokens_effective", pa.int32()),
        ("logprobs", pa.large_string()),
    ]
)
assert CHECKPOINT_SCHEMA.names == [field.name for field in fields(Completion)]

FINISH_REASONS = frozenset({"stop", "length", "tool_calls", "content_filter"})
_NOT_FINAL = frozenset({RowErrorCode.BATCH_CANCELLED, RowErrorCode.BATCH_EXPIRED})
_FILE_NAME = re.compile(r"ckpt-(\d+)-(\d+)\.parquet")
DEFAULT_MAX_ROWS = 256


def check_final(completion: Completion) -> None:
    """Refuse what is neither an answer nor a permanent error: a bug of the caller, not of the row.

    Raises:
        ValueError: says what is wrong.
    """
    if (completion.error_code is None) != (completion.finish_reason is not None):
        raise ValueError(f"row {completion.row_index} must have either a finish_reason or an error_code: {completion}")
    if completion.error_code is None:
        if completion.finish_reason not in FINISH_REASONS:
            raise ValueError(f"row {completion.row_index}: {completion.finish_reason!r} is no final finish_reason")
        if completion.text is None or completion.error_message is not None:
            raise ValueError(f"row {completion.row_index}: an answer has a text and no error_message")
    else:
        RowErrorCode(completion.error_code)
        if completion.text is not None or not completion.error_message:
            raise ValueError(f"row {completion.row_index}: an error has an error_message and no text")


class CheckpointWriter:
    """Collects one attempt's finished rows and makes them durable. Not thread-safe."""

    def __init__(
        self, storage: Storage, directory: str, shard_index: int, attempt: int, *, max_rows: int = DEFAULT_MAX_ROWS
    ) -> None:
        """Begin an attempt's checkpoints.

        Args:
            storage: Of the output.
            directory: `OutputFolder.work`.
            shard_index: Of the job.
            attempt: Of the lease.
            max_rows: `add` flushes by itself at this many.
        """
        self._storage = storage
        self._folder = shard_folder(directory, shard_index)
        self._attempt = attempt
        self._max_rows = max_rows
        self._seq = 0
        self._pending: list[Completion] = []
        self._files: list[str] = []

    @property
    def pending(self) -> int:
        """Rows that are not durable yet."""
        return len(self._pending)

    @property
    def files(self) -> tuple[str, ...]:
        """What this writer has written: give it to the attempt's CheckpointReader."""
        return tuple(self._files)

    def add(self, completion: Completion) -> bool:
        """Take a final row; True when this made all pending rows durable.

        Raises:
            ValueError: the row is not final.
            StorageError: the file cannot be written; the rows stay pending, so that `flush` may be tried again.
        """
        check_final(completion)
        if completion.error_code in _NOT_FINAL:
            raise ValueError(f"row {completion.row_index}: {completion.error_code} is decided when a job is closed")
        self._pending.append(completion)
        return len(self._pending) >= self._max_rows and self.flush() > 0

    def flush(self) -> int:
        """Write the pending rows to one file, and return how many; when it returns they are durable."""
        if not self._pending:
            return 0
        batch = to_batch(self._pending)
        while True:
            self._seq += 1
            uri = f"{self._folder}/ckpt-{self._attempt:04d}-{self._seq:06d}.parquet"
            try:
                self._write(uri, batch)
                break
            except ObjectExistsError:  # an earlier writer of the same attempt
                continue
        self._files.append(uri)
        self._pending.clear()
        failpoint("after_checkpoint_put")
        return int(batch.num_rows)

    def _write(self, uri: str, batch: pa.RecordBatch) -> None:
        with self._storage.stage(uri) as staged:
            with pq.ParquetWriter(staged.file, CHECKPOINT_SCHEMA, compression="zstd") as writer:
                writer.write_batch(batch)
            staged.create()


@dataclass(frozen=True, slots=True, order=True)
class CheckpointFile:
    """One file, in the order in which they count."""

    attempt: int
    seq: int
    uri: str


class CheckpointReader:
    """A shard's durable rows. The list of files is fixed when it is made: at claim.

    A zombie of an earlier attempt may still write files afterwards. They are not looked at: what this attempt runs
    and what it puts into the part must be one and the same set.
    """

    def __init__(self, storage: Storage, directory: str, shard_index: int) -> None:
        self._storage = storage
        uris = [info.uri for info in storage.list(shard_folder(directory, shard_index))]
        self.names = frozenset(PurePosixPath(uri).name for uri in uris)  # of all files beside the checkpoints, too
        self._files = sorted(file for file in map(_parse_name, uris) if file is not None)

    @property
    def files(self) -> tuple[CheckpointFile, ...]:
        """In the order in which they count."""
        return tuple(self._files)

    def include(self, uris: Iterable[str]) -> None:
        """Add this attempt's own files."""
        known = set(self._files)
        known.update(file for file in map(_parse_name, uris) if file is not None)
        self._files = sorted(known)

    def row_indices(self) -> set[int]:
        """Rows that need not run again. Reads the files whole: what it promises, `read` must find."""
        indices: set[int] = set()
        for table in self._tables():
            indices.update(table.column("row_index").to_pylist())
        return indices

    def read(self) -> dict[int, Completion]:
        """All durable rows by row_index, the first of each."""
        rows: dict[int, Completion] = {}
        for table in self._tables():
            for values in table.to_pylist():
                rows.setdefault(values["row_index"], Completion(**values))
        return rows

    def _tables(self) -> Iterator[Any]:
        for file in tuple(self._files):
            try:
                with self._storage.open_input(file.uri) as stream:
                    table = pq.ParquetFile(stream).read()
                if not table.schema.equals(CHECKPOINT_SCHEMA):
                    raise pa.ArrowInvalid(f"its columns are {', '.join(table.schema.names)}")
                table.validate(full=True)
            except (pa.ArrowException, OSError, StorageError) as error:
                # Its rows run again: that costs time and loses nothing.
                log.warning("skipping unreadable checkpoint %s: %s", file.uri, error)
                self._files.remove(file)
                continue
            yield table


def read_checkpoints(storage: Storage, directory: str, shard_index: int) -> dict[int, Completion]:
    """A shard's durable rows as they stand now."""
    return CheckpointReader(storage, directory, shard_index).read()


def to_batch(completions: list[Completion]) -> pa.RecordBatch:
    """Rows as a batch of CHECKPOINT_SCHEMA. Model text may hold what no Arrow string can: it is sanitised."""
    columns = []
    for field in CHECKPOINT_SCHEMA:
        values = [getattr(completion, field.name) for completion in completions]
        values = [sanitized(value) if isinstance(value, str) else value for value in values]
        columns.append(pa.array(values, field.type))
    return pa.RecordBatch.from_arrays(columns, schema=CHECKPOINT_SCHEMA)


def _parse_name(uri: str) -> CheckpointFile | None:
    match = _FILE_NAME.fullmatch(PurePosixPath(uri).name)
    return CheckpointFile(int(match[1]), int(match[2]), uri) if match else None
