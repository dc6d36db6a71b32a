"""The rows of a shard whose input is gone or was overwritten: our columns as ever, the source's as far as known."""

from collections.abc import Iterator, Mapping

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as types

from nightmill.reader import RowBatch, reading
from nightmill.records import Completion, JobSpec, ShardRange
from nightmill.sharding import source_name
from nightmill.storage import Storage

_BATCH_ROWS = 1024


def nullable(schema: pa.Schema) -> pa.Schema:
    """The same columns, each of which may hold nulls: a part without its source has nothing else for them."""
    return pa.schema([field.with_nullable(True) for field in schema], metadata=schema.metadata)


def empty_rows(
    shard: ShardRange, completions: Mapping[int, Completion], *, spec: JobSpec, schema: pa.Schema
) -> Iterator[RowBatch]:
    """Source rows of nulls, but for the ids: those of rows with a completion are known, the others go by their place.

    Args:
        shard: Which rows.
        completions: Durable rows by row_index.
        spec: Of the job.
        schema: `nullable` of the job's source schema.
    """
    name = source_name(spec.inputs, shard.source_file)
    for start in range(shard.row_start, shard.row_end, _BATCH_ROWS):
        indices = range(start, min(start + _BATCH_ROWS, shard.row_end))
        places = [f"{name}#{i}" for i in indices]
        ids = [
            completions[i].custom_id if i in completions else place for i, place in zip(indices, places, strict=True)
        ]
        known = [None if id_ == place else id_ for id_, place in zip(ids, places, strict=True)]
        columns = [
            _ids(ids, known, field.type) if field.name == "custom_id" else pa.nulls(len(indices), field.type)
            for field in schema
        ]
        batch = pa.RecordBatch.from_arrays(columns, schema=schema)
        yield RowBatch(source_file=shard.source_file, row_start=start, columns=batch)


def _ids(ids: list[str], known: list[str | None], kind: pa.DataType) -> pa.Array:
    if types.is_string(kind) or types.is_large_string(kind):
        return pa.array(ids, kind)
    return pa.array(known, pa.string()).cast(kind)


def part_rows(storage: Storage, uri: str, shard: ShardRange, *, etag: str, schema: pa.Schema) -> Iterator[RowBatch]:
    """The source's columns as a part that stands has them.

    Args:
        storage: Of the output.
        uri: Of the part.
        shard: Whose part it is.
        etag: Of the part.
        schema: Of the source.
    """
    row = shard.row_start
    with reading(uri), storage.open_input(uri, etag=etag) as stream:
        file = pq.ParquetFile(stream, pre_buffer=False)
        for batch in file.iter_batches(_BATCH_ROWS, columns=schema.names, use_threads=False):
            yield RowBatch(source_file=shard.source_file, row_start=row, columns=batch.select(schema.names))
            row += batch.num_rows
