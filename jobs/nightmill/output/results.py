"""A job's parts as Arrow: a table, batches or a dataset. Which parts there are is what the store says, never a glob."""

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.fs as pa_fs
import pyarrow.parquet as pq

from nightmill.output.arrow_files import StorageFileSystem
from nightmill.reader import reading
from nightmill.records import CommittedShard, JobInfo
from nightmill.storage import Storage, open_storage

ERROR_COLUMNS = ("source_file", "row_index", "custom_id", "error_code", "error_message")


class ResultReader:
    """Reads the committed parts of one job, in input order."""

    def __init__(self, job: JobInfo, shards: Sequence[CommittedShard], storage: Storage | None = None) -> None:
        """`shards`: at least one."""
        self._spec = job.spec
        self._shards = shards
        self._storage = storage or open_storage(job.spec.output)

    def schema(self) -> pa.Schema:
        """That of every part."""
        uri = self._shards[0].result.part_uri
        with reading(uri), self._storage.open_input(uri) as stream:
            return pq.ParquetFile(stream, pre_buffer=False).schema_arrow.remove_metadata()

    def table(self, columns: Sequence[str] | None = None) -> pa.Table:
        """All rows at once."""
        schema = self.schema()
        if columns is not None:
            schema = pa.schema([schema.field(name) for name in columns])
        return pa.Table.from_batches(self.batches(columns), schema=schema)

    def batches(
        self,
        columns: Sequence[str] | None = None,
        *,
        batch_rows: int = 8192,
        only: Sequence[CommittedShard] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Rows, a batch at a time."""
        for shard in self._shards if only is None else only:
            uri = shard.result.part_uri
            with reading(uri), self._storage.open_input(uri) as stream:
                file = pq.ParquetFile(stream, pre_buffer=False)
                for batch in file.iter_batches(batch_size=batch_rows, columns=columns, use_threads=False):
                    yield batch.replace_schema_metadata(None)

    def dataset(self) -> ds.Dataset:
        """The parts as a dataset, read through the same storage, credentials and endpoint."""
        filesystem = pa_fs.PyFileSystem(StorageFileSystem(self._storage))
        paths = [shard.result.part_uri for shard in self._shards]
        return ds.FileSystemDataset.from_paths(
            paths, schema=self.schema(), format=ds.ParquetFileFormat(), filesystem=filesystem
        )

    def errors(self) -> pa.Table:
        """ERROR_COLUMNS of the rows that have an error_code; only parts that have such rows are read."""
        columns = self.columns(ERROR_COLUMNS)
        failing = [shard for shard in self._shards if shard.result.error_codes]
        found = []
        for batch in self.batches(list(columns.values()), only=failing):
            failed = batch.filter(pc.is_valid(batch.column(columns["error_code"])))
            arrays = {name: failed.column(column) for name, column in columns.items()}
            place = pc.binary_join_element_wise(
                arrays["source_file"].cast(pa.string()), arrays["row_index"].cast(pa.string()), "#"
            )
            arrays["custom_id"] = pc.coalesce(arrays["custom_id"].cast(pa.string()), place)
            found.append(
                pa.record_batch([arrays[name].cast(t) for name, t in _ERRORS.items()], schema=pa.schema(_ERRORS))
            )
        return pa.Table.from_batches(found, schema=pa.schema(_ERRORS))

    def columns(self, names: Sequence[str]) -> dict[str, str]:
        """Our names → those in the parts, which may have a prefix; custom_id may be the source's own."""
        prefix = self._spec.output_prefix
        found = {name: prefix + name for name in names}
        if "custom_id" in found and found["custom_id"] not in self.schema().names:
            found["custom_id"] = "custom_id"
        return found


_ERRORS = {
    "source_file": pa.string(),
    "row_index": pa.int64(),
    "custom_id": pa.string(),
    "error_code": pa.string(),
    "error_message": pa.string(),
}
