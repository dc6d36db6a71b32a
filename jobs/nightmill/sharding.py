"""From what a user names as input to files, and from files to shards. Reads footers, never rows."""

import fnmatch
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from nightmill.errors import StorageError, ValidationError
from nightmill.reader import Extent, num_rows, open_source
from nightmill.reader.formats import SUFFIXES
from nightmill.records import ShardRange, SourceFile
from nightmill.storage import Storage, absolute, open_storage

DEFAULT_SHARD_ROWS = 2000
DEFAULT_SHARD_BYTES = 256 * 2**20
SPLIT_ABOVE = 4
"""A row group is split only above this many times the target: reading into its middle decodes what comes before."""

_GLOB_CHARACTERS = frozenset("*?[")


def list_sources(
    inputs: Sequence[str], *, output: str | None = None, storage: Storage | None = None
) -> tuple[SourceFile, ...]:
    """Find the input files: a file, a folder (at any depth; names that begin with `_` or `.` are skipped), or a glob.

    Files come in the order of the inputs, sorted within each, each file once. Files below `output` are left out, so
    that a job whose output lies inside its input sees the same files when it resumes.

    Raises:
        ValidationError: an input does not exist, is not readable, holds no input file, or all together have no row.
    """
    found: dict[str, SourceFile] = {}
    for name in inputs:
        for uri in _expand(absolute(name), output and absolute(output), storage or open_storage(name), name):
            if uri not in found:
                found[uri] = _describe(uri, storage or open_storage(uri))
    sources = tuple(found.values())
    if not any(source.num_rows for source in sources):
        listing = ", ".join(source.uri for source in sources[:3]) or "no input"
        raise ValidationError(f"no rows to run: {listing}", hint="Check that the input is the file you meant.")
    return sources


def plan_shards(
    sources: Sequence[SourceFile],
    shard_rows: int = DEFAULT_SHARD_ROWS,
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    storage: Storage | None = None,
) -> tuple[ShardRange, ...]:
    """Cut every file into ranges of about `shard_rows` rows or `shard_bytes` (uncompressed), whichever is less.

    Boundaries fall on row groups unless one alone is above SPLIT_ABOVE times the target. A function of its arguments
    and the files' footers only: the same input is always cut the same way.
    """
    if shard_rows < 1 or shard_bytes < 1:
        raise ValidationError(f"a shard must have at least one row and one byte, not {shard_rows} and {shard_bytes}")
    ranges: list[ShardRange] = []
    for source in sources:
        with open_source(source.uri, storage) as file:
            for start, end in _cut(file.extents, shard_rows, shard_bytes):
                ranges.append(ShardRange(index=len(ranges), source_file=source.uri, row_start=start, row_end=end))
    return tuple(ranges)


def source_name(inputs: Sequence[str], source_file: str) -> str:
    """Name a source file as output rows show it: its path below the folder that all inputs have in common.

    Unique within the job, and the same wherever the data lies: seeds and default ids are made from it.
    """
    uri = absolute(source_file)
    root = os.path.commonpath([_root(absolute(name), uri) for name in inputs]) if inputs else os.path.dirname(uri)  # noqa: PTH120
    name = os.path.relpath(uri, root)
    return PurePosixPath(name).as_posix() if not name.startswith("..") else PurePosixPath(uri).name


def _root(name: str, uri: str) -> str:
    """Folder that an input's names are relative to, told without looking at the disk."""
    path = PurePosixPath(name)
    fixed: list[str] = []
    for part in path.parts:
        if _GLOB_CHARACTERS & set(part):
            return str(PurePosixPath(*fixed))
        fixed.append(part)
    return str(path.parent) if name == uri or path.suffix.lower() in SUFFIXES else name


def _expand(name: str, output: str | None, storage: Storage, given: str) -> Iterator[str]:
    if storage.stat(name) is not None:
        yield name
        return
    if _GLOB_CHARACTERS & set(name):
        root = _root(name, name)
        pattern = PurePosixPath(name).parts
        uris = [info.uri for info in storage.list(root) if _match(PurePosixPath(info.uri).parts, pattern)]
    else:
        root = name
        uris = [info.uri for info in storage.list(name) if info.uri.lower().endswith(SUFFIXES)]
    visible = [uri for uri in uris if not _is_hidden(uri, root) and not (output and _is_below(uri, output))]
    if not visible:
        raise ValidationError(
            f"{given}: there is no such file, nor a folder or glob with input files in it",
            hint="Give a Parquet or .jsonl file, a folder that holds some, or a quoted glob.",
        )
    yield from visible


def _match(names: Sequence[str], parts: Sequence[str]) -> bool:
    """Path globs: `*`, `?` and `[…]` stay within one name, `**` crosses folders."""
    if not parts:
        return not names
    if parts[0] == "**":
        return any(_match(names[i:], parts[1:]) for i in range(len(names) + 1))
    return bool(names) and fnmatch.fnmatchcase(names[0], parts[0]) and _match(names[1:], parts[1:])


def _is_hidden(uri: str, root: str) -> bool:
    return any(part.startswith(("_", ".")) for part in PurePosixPath(os.path.relpath(uri, root)).parts)


def _is_below(uri: str, folder: str) -> bool:
    return PurePosixPath(uri).is_relative_to(folder)


def _describe(uri: str, storage: Storage) -> SourceFile:
    info = storage.stat(uri)
    if info is None:
        raise ValidationError(f"{uri} went away while it was being read")
    try:
        uri.encode("utf-8")
    except UnicodeEncodeError:
        raise ValidationError(f"{uri!r}: the file's name is not valid UTF-8", hint="Rename it.") from None
    try:
        with open_source(uri, storage) as source:
            return SourceFile(uri=uri, num_rows=num_rows(source), size_bytes=info.size_bytes, etag=info.etag)
    except StorageError as error:  # before anything is submitted it is the input that does not fit
        raise ValidationError(error.message, hint=error.hint) from error


def _cut(extents: Sequence[Extent], shard_rows: int, shard_bytes: int) -> Iterator[tuple[int, int]]:
    """Row ranges of one file. An extent's weight is in targets: a shard is closed before it would weigh more than 1."""
    start = end = 0
    weight = 0.0
    for extent in extents:
        extra = max(extent.num_rows / shard_rows, extent.num_bytes / shard_bytes) if extent.num_rows else 0.0
        if end > start and weight + extra > 1:
            yield start, end
            start, weight = end, 0.0
        if extra > SPLIT_ABOVE:
            yield from _split(end, extent.num_rows, min(math.ceil(extra), extent.num_rows))
            start = end = end + extent.num_rows
            weight = 0.0
            continue
        end += extent.num_rows
        weight += extra
    if end > start:
        yield start, end


def _split(first: int, rows: int, pieces: int) -> Iterator[tuple[int, int]]:
    """Even pieces; sizes differ by at most one row."""
    cuts = [first + rows * i // pieces for i in range(pieces + 1)]
    yield from itertools.pairwise(cuts)
