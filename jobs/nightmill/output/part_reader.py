"""A part's own columns read back: what `nightmill retry` keeps of a part that it replaces."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nightmill.errors import StorageError
from nightmill.reader import RowBatch, reading
from nightmill.records import Completion, JobSpec, ShardRange
from nightmill.rows.parse import custom_ids
from nightmill.storage import Storage

_BATCH_ROWS = 1024
_COMPLETION_FIELDS = tuple(field.name for field in fields(Completion))


@dataclass(frozen=True, slots=True)
class PartRow:
    """One row as it stands in a part."""

    completion: Completion
    model: str

    @property
    def is_answered(self) -> bool:
        """It has a completion, so no retry touches it."""
        return self.completion.error_code is None


def read_part(
    storage: Storage, uri: str, shard: ShardRange, *, spec: JobSpec, etag: str | None = None
) -> dict[int, PartRow]:
    """All rows of a shard's part by row_index, without the source columns.

    Args:
        storage: Of the output.
        uri: Of the part.
        shard: Whose part it is.
        spec: Of the job: how its columns are named.
        etag: Of the part as committed; None: as it stands.

    Raises:
        SourceChangedError: it is another part than that of `etag`.
        StorageError: it cannot be read, or its rows are not the shard's.
    """
    rows: dict[int, PartRow] = {}
    expected = shard.row_start
    with reading(uri), storage.open_input(uri, etag=etag) as stream:
        file = pq.ParquetFile(stream, pre_buffer=False)
        for batch in file.iter_batches(_BATCH_ROWS, columns=_columns(file.schema_arrow, spec), use_threads=False):
            for row in _rows(batch, shard, spec, expected):
                if row.completion.row_index != expected:
                    raise StorageError(f"{uri}: row {row.completion.row_index} stands where row {expected} should be")
                rows[expected] = row
                expected += 1
    if expected != shard.row_end:
        raise StorageError(f"{uri} has {len(rows):,} rows, not the {shard.num_rows:,} of shard {shard.index}")
    return rows


def _columns(schema: pa.Schema, spec: JobSpec) -> list[str]:
    ours = [_name(field, spec) for field in _COMPLETION_FIELDS] + [spec.output_prefix + "model"]
    return [name for name in {*ours, "custom_id"} if name in schema.names]


def _name(field: str, spec: JobSpec) -> str:
    return spec.output_prefix + (spec.output_column if field == "text" else field)


def _rows(batch: pa.RecordBatch, shard: ShardRange, spec: JobSpec, row_start: int) -> Iterator[PartRow]:
    lists = {name: batch.column(name).to_pylist() for name in batch.schema.names if name != "custom_id"}
    ids = lists.get(spec.output_prefix + "custom_id")
    if ids is None:  # the source's own stand for ours, written as they are
        ids = custom_ids(RowBatch(source_file=shard.source_file, row_start=row_start, columns=batch), spec)
    models = lists[spec.output_prefix + "model"]
    values = {field: lists.get(_name(field, spec)) for field in _COMPLETION_FIELDS}
    for position, (custom_id, model) in enumerate(zip(ids, models, strict=True)):
        row: dict[str, Any] = {field: of[position] for field, of in values.items() if of is not None}
        if row["seed"] is not None:
            row["seed"] %= 2**64
        yield PartRow(Completion(**{**row, "custom_id": custom_id}), model)


def kept_rows(rows: Mapping[int, PartRow], completions: Mapping[int, Completion]) -> dict[int, PartRow]:
    """Rows that a replacement takes over: answered before, or not run again."""
    return {index: row for index, row in rows.items() if row.is_answered or index not in completions}
