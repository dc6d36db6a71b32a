"""A shard's part: every source row once, in input order, with its answer or its error. Creating it publishes it."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq

from nightmill.errors import OutputOccupiedError, StorageError
from nightmill.failpoint import failpoint
from nightmill.output.folder import OutputFolder
from nightmill.output.lost_source import empty_rows, nullable, part_rows
from nightmill.output.part_reader import kept_rows, read_part
from nightmill.output.part_rows import PartRows, Unanswered
from nightmill.reader import read_range, reading
from nightmill.reader.source import METADATA_PREFIX
from nightmill.records import Completion, JobSpec, RowCounts, ShardRange, ShardResult, TokenCounts
from nightmill.rows.schema import output_schema
from nightmill.storage import ObjectExistsError, ObjectInfo, PreconditionFailedError, StagedObject, Storage

_NAMES = ("job_id", "shard_index", "spec_digest", "counts", "replaces")
_KEYS = {name: METADATA_PREFIX + name.encode() for name in _NAMES}


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
    replaces: str | None = None  # etag of the part that a retry has put this one in place of; told of adopted ones

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
    attempt: int = 0,
    unanswered: Unanswered | None = None,
    source_storage: Storage | None = None,
    look_first: bool = True,
    source_lost: bool = False,
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
        attempt: Of the lease. Where creation is not atomic it names what `publish_part` makes final after the commit.
        unanswered: A closer's error for rows without a completion.
        source_storage: Of the input; None: by its uri.
        source_lost: The input cannot be read any more: its columns are null, and may be in this part.
        look_first: False: a moment ago there was no part. One that has come since is met when ours is created.

    Raises:
        StorageError: a row has no completion; the source has changed; reading or writing failed. Nothing is published.
        OutputOccupiedError: the part's name is taken by something else.
    """
    target = _Target(storage, folder, shard, attempt)
    if (look_first or not target.is_final) and (existing := find_part(storage, folder, shard, spec_digest)):
        return existing
    source = partial(read_range, shard, storage=source_storage)
    if source_lost:
        source_schema = nullable(source_schema)
        source = partial(empty_rows, shard, completions, spec=spec, schema=source_schema)
    rows = PartRows(
        shard,
        completions,
        spec=spec,
        model=model,
        source_schema=source_schema,
        unanswered=unanswered,
        source=source,
    )
    owner = _owner(folder, shard, spec_digest)
    with _built(storage, target.uri, shard, rows, output_schema(source_schema, spec), spec, owner) as staged:
        try:
            info = staged.create() if target.is_final else staged.replace()
        except ObjectExistsError:
            existing = find_part(storage, folder, shard, spec_digest)
            if existing is None:
                raise
            return existing
    failpoint("after_part_put")
    return _written(folder, shard, info, rows)


def replace_part(
    storage: Storage,
    folder: OutputFolder,
    shard: ShardRange,
    completions: Mapping[int, Completion],
    *,
    etag: str,
    spec: JobSpec,
    spec_digest: str,
    source_schema: pa.Schema,
    model: str,
    attempt: int = 0,
    source_storage: Storage | None = None,
    source_lost: bool = False,
) -> PartInfo:
    """Build the part anew with the answers of a retry and put it in the old one's place, in one conditional write.

    Rows with a completion are taken over bit for bit, whatever `completions` says of them; so is an error row that has
    no new completion. Safe to run again after a crash: a part that this retry has put in place already is adopted.

    Args:
        storage: Of the output.
        folder: Of the job.
        shard: Which rows.
        completions: Of the rows that ran again, by row_index: answers, or errors once more.
        etag: Of the part to replace, as the shard's last commit recorded it.
        spec: Of the job.
        spec_digest: Of the job.
        source_schema: `job_source_schema`.
        model: Value of the `model` column, of the rows that ran again.
        attempt: Of the lease; see `write_part`.
        source_storage: Of the input; None: by its uri.
        source_lost: The input cannot be read any more: its columns are those of the part that stands.

    Raises:
        PreconditionFailedError: the part is not the one of `etag`, nor one that this retry has made of it.
        StorageError: the part is gone, the source has changed, reading or writing failed. The old part stands.
    """
    existing = _require_part(storage, folder, shard, spec_digest)
    target = _Target(storage, folder, shard, attempt)
    if target.is_final and existing.etag != etag:  # elsewhere the fence of the commit decides, not the etag
        return _adopt_replacement(existing, etag)
    kept = kept_rows(read_part(storage, existing.uri, shard, spec=spec, etag=existing.etag), completions)
    if len(kept) == shard.num_rows:
        return existing
    source = partial(read_range, shard, storage=source_storage)
    if source_lost:
        source_schema = nullable(source_schema)
        source = partial(part_rows, storage, existing.uri, shard, etag=existing.etag, schema=source_schema)
    rows = PartRows(
        shard,
        completions,
        spec=spec,
        model=model,
        source_schema=source_schema,
        kept=kept,
        source=source,
    )
    owner = {**_owner(folder, shard, spec_digest), _KEYS["replaces"]: etag.encode()}
    with _built(storage, target.uri, shard, rows, output_schema(source_schema, spec), spec, owner) as staged:
        try:
            info = staged.replace(etag=etag if target.is_final else None)
        except PreconditionFailedError:
            return _adopt_replacement(_require_part(storage, folder, shard, spec_digest), etag)
    failpoint("after_part_put")
    return _written(folder, shard, info, rows)


def publish_part(storage: Storage, folder: OutputFolder, shard_index: int, attempt: int) -> None:
    """Give a committed part its final name where creation is not atomic; elsewhere it has it, and nothing is done.

    Call it after the commit of `attempt` was accepted, and only then: the fence is what makes one writer of many. Safe
    to repeat; the end of the job does it for all whose worker died in between.
    """
    target = _Target(storage, folder, ShardRange(index=shard_index, source_file="", row_start=0, row_end=0), attempt)
    if not target.is_final and storage.stat(target.uri) is not None:
        storage.copy(target.uri, folder.part(shard_index))


class _Target:
    """Where an attempt writes its part: under its final name, or where creation is not atomic under its own."""

    def __init__(self, storage: Storage, folder: OutputFolder, shard: ShardRange, attempt: int) -> None:
        self.is_final = storage.creates_atomically(folder.root)
        self.uri = folder.part(shard.index) if self.is_final else folder.attempt_part(shard.index, attempt)


@contextlib.contextmanager
def _built(
    storage: Storage,
    uri: str,
    shard: ShardRange,
    rows: PartRows,
    schema: pa.Schema,
    spec: JobSpec,
    owner: Mapping[bytes, bytes],
) -> Iterator[StagedObject]:
    with storage.stage(uri) as staged:
        with pq.ParquetWriter(staged.file, schema, compression="zstd") as writer:
            for table in rows.tables(schema):
                writer.write_table(table, row_group_size=max(table.num_rows, 1))
            writer.add_key_value_metadata({**owner, _KEYS["counts"]: _counts(rows)})
        _verify(staged, shard, schema, spec)
        yield staged


def _written(folder: OutputFolder, shard: ShardRange, info: ObjectInfo, rows: PartRows) -> PartInfo:
    return PartInfo(
        uri=folder.part(shard.index),
        bytes=info.size_bytes,
        etag=info.etag,
        rows=rows.counts,
        tokens=rows.tokens,
        error_codes=rows.error_codes,
        adopted=False,
    )


def _require_part(storage: Storage, folder: OutputFolder, shard: ShardRange, spec_digest: str) -> PartInfo:
    existing = find_part(storage, folder, shard, spec_digest)
    if existing is None:
        raise StorageError(
            f"the committed part {folder.part(shard.index)} is gone: something other than nightmill removed it",
            hint="put the file back and retry again, or submit the job anew into another output",
        )
    return existing


def _adopt_replacement(existing: PartInfo, etag: str) -> PartInfo:
    if existing.replaces == etag:
        return existing
    raise PreconditionFailedError(
        f"{existing.uri} is not the part that was committed: its etag is {existing.etag}, not {etag}",
        hint="something other than nightmill wrote it: put the file back and retry again",
    )


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
        with storage.open_input(uri, etag=info.etag) as stream:
            metadata = pq.ParquetFile(stream).metadata.metadata or {}
    except (pa.ArrowException, OSError) as error:
        raise _occupied(uri, f"it is not readable ({error})") from error
    expected = _owner(folder, shard, spec_digest)
    if any(metadata.get(key) != value for key, value in expected.items()):
        owner = metadata.get(_KEYS["job_id"], b"no job").decode(errors="replace")
        raise _occupied(uri, f"it is of {owner}, not shard {shard.index} of {folder.job_id} with this spec")
    counts = json.loads(metadata[_KEYS["counts"]])
    replaces = metadata.get(_KEYS["replaces"])
    return PartInfo(
        uri=uri,
        bytes=info.size_bytes,
        etag=info.etag,
        rows=RowCounts(**counts["rows"]),
        tokens=TokenCounts(**counts["tokens"]),
        error_codes=counts["error_codes"],
        adopted=True,
        replaces=None if replaces is None else replaces.decode(),
    )


def _owner(folder: OutputFolder, shard: ShardRange, spec_digest: str) -> dict[bytes, bytes]:
    return {
        _KEYS["job_id"]: folder.job_id.encode(),
        _KEYS["shard_index"]: str(shard.index).encode(),
        _KEYS["spec_digest"]: spec_digest.encode(),
    }


def _counts(rows: PartRows) -> bytes:
    counts = {
        "rows": {name: getattr(rows.counts, name) for name in RowCounts.__slots__},
        "tokens": {name: getattr(rows.tokens, name) for name in TokenCounts.__slots__},
        "error_codes": rows.error_codes,
    }
    return json.dumps(counts, sort_keys=True).encode()


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
