"""A shard's rows as batches that know where they come from."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from nightmill.errors import StorageError
from nightmill.reader.columns import resolve_columns
from nightmill.reader.formats import open_source
from nightmill.reader.source import Source, num_rows
from nightmill.records import JobSpec, ShardRange
from nightmill.storage import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBatch:
    """Consecutive rows of one source file."""

    source_file: str  # uri
    row_start: int  # row_index of the first row
    columns: pa.RecordBatch

    @property
    def num_rows(self) -> int:
        """Rows in the batch."""
        return int(self.columns.num_rows)


def read_range(
    shard: ShardRange, columns: Sequence[str] | None = None, *, storage: Storage | None = None
) -> Iterator[RowBatch]:
    """Stream a shard's rows in order; `None` = all columns.

    Raises:
        StorageError: the file is missing, damaged, or shorter than when it was planned.
    """
    with open_source(shard.source_file, storage) as source:
        yield from _stream(source, shard, columns)


def read_shard(shard: ShardRange, spec: JobSpec, *, storage: Storage | None = None) -> Iterator[RowBatch]:
    """Stream only the columns that requests are made from; feed each batch to `nightmill.rows.parse_rows`."""
    with open_source(shard.source_file, storage) as source:
        yield from _stream(source, shard, resolve_columns(source.schema, spec, where=shard.source_file).names)


def _stream(source: Source, shard: ShardRange, columns: Sequence[str] | None) -> Iterator[RowBatch]:
    have = num_rows(source)
    if have < shard.row_end:
        raise StorageError(
            f"{shard.source_file} has {have:,} rows, but had at least {shard.row_end:,} when the job was planned",
            hint="The input was changed under the job. Put the old file back, or start a new job.",
        )
    row = shard.row_start
    for batch in source.batches(shard.row_start, shard.row_end, columns):
        yield RowBatch(source_file=shard.source_file, row_start=row, columns=batch)
        row += batch.num_rows
    if row != shard.row_end:
        raise StorageError(f"{shard.source_file} ended at row {row:,}, before row {shard.row_end:,}")
