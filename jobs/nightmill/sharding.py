"""From what a user names as input to files, and from files to shards. Reads footers, never rows."""

import fnmatch
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from nightmill.errors import StorageError, ValidationError
from nightmill.reader import Extent, num_rows, open_source
from nightmill.reader.formats import SUFFIXES
from nightmill.reader.many import Progress, map_files
from nightmill.records import ShardRange, SourceFile
from nightmill.storage import ObjectInfo, Storage, absolute, open_storage
from nightmill.storage.location import joined, segments

DEFAULT_SHARD_ROWS = 2000
DEFAULT_SHARD_BYTES = 256 * 2**20
SPLIT_ABOVE = 4
"""A row group is split only above this many times the target: reading into its middle decodes what comes before."""

_GLOB_CHARACTERS = frozenset("*?[")


def list_sources(
    inputs: Sequence[str],
    *,
    output: str | None = None,
    storage: Storage | None = None,
    progress: Progress | None = None,
) -> tuple[SourceFile, ...]:
    """Find the input files: a file, a folder (at any depth; names that begin with `_` or `.` are skipped), or a glob.

    Files come in the order of the inputs, sorted within each, each file once. Files below `output` are left out, so
    that a job whose output lies inside its input sees the same files when it resumes.

    Args:
        inputs: Locations, on the local disk, in object stores, or both.
        output: Of the job.
        storage: Of the inputs; None: by their uris.
        progress: Told how many files of how many have been looked at.

    Raises:
        ValidationError: an input does not exist, is not readable, holds no input file, or all together have no row.
    """
    found: dict[str, ObjectInfo] = {}
    for name in inputs:
        for info in _expand(absolute(name), output and absolute(output), storage or open_storage(name), name):
            found.setdefault(info.uri, info)
    sources = tuple(map_files(lambda uri: _describe(found[uri], storage), list(found), progress=progress))
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
    progress: Progress | None = None,
) -> tuple[ShardRange, ...]:
    """Cut every file into ranges of about `shard_rows` rows or `shard_bytes` (uncompressed), whichever is less.

    Boundaries fall on row groups unless one alone is above SPLIT_ABOVE times the target. A function of its arguments
    and the files' footers only: the same input is always cut the same way.
    """
    if shard_rows < 1 or shard_bytes < 1:
        raise ValidationError(f"a shard must have at least one row and one byte, not {shard_rows} and {shard_bytes}")

    def cut(uri: str) -> list[tuple[int, int]]:
        with open_source(uri, storage) as file:
            return list(_cut(file.extents, shard_rows, shard_bytes))

    uris = [source.uri for source in sources]
    ranges = (
        (uri, *rows) for uri, cuts in zip(uris, map_files(cut, uris, progress=progress), strict=True) for rows in cuts
    )
    return tuple(
        ShardRange(index=index, source_file=uri, row_start=start, row_end=end)
        for index, (uri, start, end) in enumerate(ranges)
    )


def source_name(inputs: Sequence[str], source_file: str) -> str:
    """Name a source file as output rows show it: its path below the folder that all inputs have in common.

    Unique within the job, and the same wherever the data lies: seeds and default ids are made from it. Inputs that
    have nothing in common, a local one and one in an object store, leave a file its whole location.
    """
    uri = absolute(source_file)
    names = segments(uri)
    root = _common([_root(absolute(name), uri) for name in inputs]) if inputs else names[:-1]
    if not root:
        return uri
    below = names[: len(root)] == root and len(names) > len(root)
    return "/".join(names[len(root) :]) if below else names[-1]


def _root(name: str, uri: str) -> list[str]:
    """Folder that an input's names are relative to, told without looking at what is there."""
    names = segments(name)
    for position, part in enumerate(names[1:], 1):
        if _GLOB_CHARACTERS & set(part):
            return names[:position]
    return names[:-1] if name == uri or PurePosixPath(name).suffix.lower() in SUFFIXES else names


def _common(paths: Sequence[Sequence[str]]) -> list[str]:
    return [names[0] for names in itertools.takewhile(lambda names: len(set(names)) == 1, zip(*paths, strict=False))]


def _expand(name: str, output: str | None, storage: Storage, given: str) -> Iterator[ObjectInfo]:
    info = storage.stat(name)
    if info is not None:
        yield info
        return
    infos: list[ObjectInfo] = []
    if _GLOB_CHARACTERS & set(name):
        root = _root(name, name)
        pattern = segments(name)
        infos = [info for info in storage.list(joined(root)) if _match(segments(info.uri), pattern)]
    if not infos:  # no pattern, or a folder that is called so
        root = segments(name)
        infos = [info for info in storage.list(name) if info.uri.lower().endswith(SUFFIXES)]
    visible = [i for i in infos if not _is_hidden(i.uri, root) and not (output and _is_below(i.uri, output))]
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


def _is_hidden(uri: str, root: Sequence[str]) -> bool:
    return any(name.startswith(("_", ".")) for name in segments(uri)[len(root) :])


def _is_below(uri: str, folder: str) -> bool:
    names = segments(folder)
    return segments(uri)[: len(names)] == names


def _describe(info: ObjectInfo, storage: Storage | None) -> SourceFile:
    uri = info.uri
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
