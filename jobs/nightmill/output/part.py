"""A shard's part: every source row once, in input order, with its answer or its error. Creating it publishes it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from nightmill.errors import OutputOccupiedError, StorageError
from nightmill.failpoint import failpoint
from nightmill.output.folder import OutputFolder
from nightmill.output.part_rows import PartRows, Unanswered
from nightmill.reader import reading
from nightmill.reader.source import METADATA_PREFIX
from nightmill.records import Completion, JobSpec, RowCounts, ShardRange, ShardResult, TokenCounts
from nightmill.rows.schema import output_schema
from nightmill.storage import ObjectExistsError, ObjectInfo, StagedObject, Storage

_KEYS = {name: METADATA_PREFIX + name.encode() for name in ("job_id", "shard_index", "spec_digest", "counts")}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartInfo:
    """A part as it stands, whoever wrote it: all numbers are read from its metadata."""

    uri: str
    bytes: int
    etag: str
    rows: RowCounts
    tokens: TokenCounts
    error_codes: dict[str, int]
    adopted: bool  # it was there before: an earlier attempt got as far

    def result(self, *, rows_resumed: int = 0, rows_recomputed: int = 0) -> ShardResult:
        """What the commit records."""
        return ShardResult(
            rows=self.rows,
            tokens=self.tokens,
            error_codes=self.error_codes,
            part_uri=self.uri,
            part_bytes=self.bytes,
            part_etag=self.etag,
            rows_resumed=rows_resumed,
            rows_recomputed=rows_recomputed,
        )


def write_part(
    storage: Storage,
    folder: OutputFolder,
    shard: ShardRange,
    completions: Mapping[int, Completion],
    *,
    spec: JobSpec,
    spec_digest: str,
    source_schema: pa.Schema,
    model: str,
    unanswered: Unanswered | None = None,
    source_storage: Storage | None = None,
) -> PartInfo:
    """Build the shard's part from its source rows and their completions, check it, and create it.

    Memory is bounded by the size of a row group of the part, not of the shard or a column: source rows are read again
    and streamed through. If the part exists and is ours it is adopted, and nothing is written.

    Args:
        storage: Of the output.
        folder: Of the job.
        shard: Which rows.
        completions: By row_index; all rows of the shard, or `unanswered` says what to write for the rest.
        spec: Of the job.
        spec_digest: Goes into the part, so that a later attempt knows it for its own.
        source_schema: `job_source_schema`: the same for all shards of the job.
        model: Value of the `model` column.
        unanswered: A closer's error for rows without a completion.
        source_storage: Of the input; None: by its uri.

    Raises:
        StorageError: a row has no completion; the source has changed; reading or writing failed. Nothing is published.
        OutputOccupiedError: the part's name is taken by something else.
    """
    if existing := find_part(storage, folder, shard, spec_digest):
        return existing
    rows = PartRows(
        shard,
        completions,
        spec=spec,
        model=model,
        source_schema=source_schema,
        unanswered=unanswered,
        source_storage=source_storage,
    )
    schema = output_schema(source_schema, spec)
    uri = folder.part(shard.index)
    with storage.stage(uri) as staged:
        with pq.ParquetWriter(staged.file, schema, compression="zstd") as writer:
            for table in rows.tables(schema):
                writer.write_table(table, row_group_size=max(table.num_rows, 1))
            writer.add_key_value_metadata(_identity(folder, shard, spec_digest, rows))
        _verify(staged, shard, schema, spec)
        try:
            info = staged.create()
        except ObjectExistsError:
            existing = find_part(storage, folder, shard, spec_digest)
            if existing is None:
                raise
            return existing
    failpoint("after_part_put")
    return _part_info(info, rows.counts, rows.tokens, rows.error_codes, adopted=False)


def find_part(storage: Storage, folder: OutputFolder, shard: ShardRange, spec_digest: str) -> PartInfo | None:
    """The shard's part if it stands and is of this job, shard and spec; None: there is none.

    Raises:
        OutputOccupiedError: the name is taken by something that is not ours.
    """
    uri = folder.part(shard.index)
    info = storage.stat(uri)
    if info is None:
        return None
    try:
        with storage.open_input(uri) as stream:
            metadata = pq.ParquetFile(stream).metadata.metadata or {}
    except (pa.ArrowException, OSError) as error:
        raise _occupied(uri, f"it is not readable ({error})") from error
    expected = _owner(folder, shard, spec_digest)
    if any(metadata.get(key) != value for key, value in expected.items()):
        owner = metadata.get(_KEYS["job_id"], b"no job").decode(errors="replace")
        raise _occupied(uri, f"it is of {owner}, not shard {shard.index} of {folder.job_id} with this spec")
    counts = json.loads(metadata[_KEYS["counts"]])
    return _part_info(
        info, RowCounts(**counts["rows"]), TokenCounts(**counts["tokens"]), counts["error_codes"], adopted=True
    )


def _part_info(
    info: ObjectInfo, rows: RowCounts, tokens: TokenCounts, error_codes: dict[str, int], *, adopted: bool
) -> PartInfo:
    return PartInfo(
        uri=info.uri,
        bytes=info.size_bytes,
        etag=info.etag,
        rows=rows,
        tokens=tokens,
        error_codes=error_codes,
        adopted=adopted,
    )


def _owner(folder: OutputFolder, shard: ShardRange, spec_digest: str) -> dict[bytes, bytes]:
    return {
        _KEYS["job_id"]: folder.job_id.encode(),
        _KEYS["shard_index"]: str(shard.index).encode(),
        _KEYS["spec_digest"]: spec_digest.encode(),
    }


def _identity(folder: OutputFolder, shard: ShardRange, spec_digest: str, rows: PartRows) -> dict[bytes, bytes]:
    counts = {
        "rows": {name: getattr(rows.counts, name) for name in RowCounts.__slots__},
        "tokens": {name: getattr(rows.tokens, name) for name in TokenCounts.__slots__},
        "error_codes": rows.error_codes,
    }
    return {**_owner(folder, shard, spec_digest), _KEYS["counts"]: json.dumps(counts, sort_keys=True).encode()}


def _verify(staged: StagedObject, shard: ShardRange, schema: pa.Schema, spec: JobSpec) -> None:
    """Read the staged part back: nobody may ever see one that is short, out of order or of another schema."""
    prefix = spec.output_prefix
    names = [f"{prefix}row_index", f"{prefix}finish_reason", f"{prefix}error_code"]
    what = f"the part of shard {shard.index}"
    with reading(what, "read back"), staged.open_input() as stream:
        file = pq.ParquetFile(stream, pre_buffer=False)
        if not file.schema_arrow.equals(schema):
            raise StorageError(f"{what} was not written: its schema came out as\n{file.schema_arrow}\nnot as\n{schema}")
        expected = shard.row_start
        for batch in file.iter_batches(columns=names, use_threads=False):
            rows = batch.to_pydict()
            for index, reason, code in zip(*(rows[name] for name in names), strict=True):
                if index != expected or (reason is None) == (code is None):
                    raise StorageError(f"{what} was not written: row {expected} came out as {index}, {reason}, {code}")
                expected += 1
    if expected != shard.row_end:
        raise StorageError(f"{what} was not written: it has {expected - shard.row_start} of {shard.num_rows} rows")


def _occupied(uri: str, why: str) -> OutputOccupiedError:
    return OutputOccupiedError(
        f"{uri} was not written by this job: {why}", hint="Move it away, or choose another output folder with -o."
    )
