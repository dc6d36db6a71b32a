"""A Parquet file as a Source: footers for planning, bounded batches for reading."""

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

import pyarrow as pa
import pyarrow.parquet as pq

from nightmill.reader.source import BATCH_BYTES, MAX_BATCH_ROWS, METADATA_PREFIX, Extent, reading
from nightmill.storage import Storage, open_storage

_STREAM_BUFFER_BYTES = 2**20


class ParquetSource:
    """An open Parquet file. Opening reads the footer only."""

    def __init__(self, uri: str, storage: Storage | None = None) -> None:
        self._uri = uri
        self._input = (storage or open_storage(uri)).open_input(uri)
        try:
            with reading(uri, "read Parquet file"):
                # Without pre_buffer and with a stream buffer a column chunk is never held as a whole.
                self._file = pq.ParquetFile(self._input, pre_buffer=False, buffer_size=_STREAM_BUFFER_BYTES)
                self._schema = _without_our_metadata(self._file.schema_arrow)
        except BaseException:
            self._input.close()
            raise

    @property
    def uri(self) -> str:
        """Where it is."""
        return self._uri

    @property
    def schema(self) -> pa.Schema:
        """Columns as Arrow reads them, with the file's metadata."""
        return self._schema

    @property
    def extents(self) -> list[Extent]:
        """One for each row group, empty ones too."""
        metadata = self._file.metadata
        groups = (metadata.row_group(i) for i in range(metadata.num_row_groups))
        return [Extent(num_rows=group.num_rows, num_bytes=group.total_byte_size) for group in groups]

    def batches(self, row_start: int, row_end: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Stream rows; those before `row_start` in its row group are decoded and dropped, in Arrow."""
        groups, skip = self._groups_of(row_start, row_end)
        if not groups:
            return
        left = row_end - row_start
        with reading(self._uri):
            stream = self._file.iter_batches(
                batch_size=self._batch_rows(groups, columns),
                row_groups=groups,
                columns=None if columns is None else list(columns),
                use_threads=False,
            )
            for batch in stream:
                if skip >= batch.num_rows:
                    skip -= batch.num_rows
                    continue
                piece = (batch if columns is None else batch.select(list(columns))).slice(skip, left)
                skip = 0
                left -= piece.num_rows
                yield piece
                if not left:
                    return

    def _groups_of(self, row_start: int, row_end: int) -> tuple[list[int], int]:
        """Row groups that hold the range, and how many rows of the first come before it."""
        groups: list[int] = []
        skip = first = 0
        for index, extent in enumerate(self.extents):
            end = first + extent.num_rows
            if first < row_end and end > row_start and extent.num_rows:
                if not groups:
                    skip = row_start - first
                groups.append(index)
            first = end
        return groups, skip

    def _batch_rows(self, groups: list[int], columns: Sequence[str] | None) -> int:
        num_bytes = rows = 0
        for index in groups:
            group = self._file.metadata.row_group(index)
            rows += group.num_rows
            for position in range(group.num_columns):
                column = group.column(position)
                path = column.path_in_schema + "."
                if columns is None or any(path.startswith(f"{name}.") for name in columns):
                    num_bytes += column.total_uncompressed_size
        return max(1, min(MAX_BATCH_ROWS, BATCH_BYTES * rows // max(num_bytes, 1)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._input.close()


def _without_our_metadata(schema: pa.Schema) -> pa.Schema:
    metadata = {k: v for k, v in (schema.metadata or {}).items() if not k.startswith(METADATA_PREFIX)}
    return schema.with_metadata(metadata or None)
