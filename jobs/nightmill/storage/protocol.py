"""What every store of objects must offer, and no more: it fits a local disk and S3 alike.

Publication is creation: an object appears whole under its final name, or it does not appear. The two conditional
writes are those of S3: `create` is `IfNoneMatch: *` (a local hard link), `replace` is `IfMatch: <etag>`.
"""

from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, Protocol, Self

from nightmill.errors import StorageError

if TYPE_CHECKING:
    import pyarrow as pa


class ObjectExistsError(StorageError):
    """An object of this name exists already."""

    code = "object_exists"


class PreconditionFailedError(StorageError):
    """The object is not the one that was to be replaced."""

    code = "precondition_failed"


class SourceChangedError(StorageError):
    """An input was overwritten while a job was reading it, or is gone."""

    code = "source_changed"

    def __init__(self, message: str | None = None, *, hint: str | None = None, uri: str = "", is_gone: bool = False):
        super().__init__(message, hint=hint)
        self.uri = uri
        self.is_gone = is_gone


def changed(uri: str, *, expected: str, found: str | None) -> SourceChangedError:
    """The error for an object that is not the one that was to be read."""
    what = "is gone" if found is None else f"was overwritten: its etag is {found}, and was {expected} before"
    hint = "Put the old file back and run again, or start a new job."
    return SourceChangedError(f"{uri} {what}", hint=hint, uri=uri, is_gone=found is None)


def is_source_lost(error: BaseException, uri: str) -> bool:
    """Whether this input is gone for good: the store says so, or that it holds another version."""
    return isinstance(error, SourceChangedError) and error.uri == uri


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """An object as listed: enough to tell whether it has changed."""

    uri: str
    size_bytes: int
    etag: str  # object store; local files: "mtime_ns-size"


class StagedObject(Protocol):
    """An object being written, invisible under its final name until `create` or `replace`.

    A context manager: what was not published on leaving is thrown away.
    """

    @property
    def file(self) -> BinaryIO:
        """Write here, from start to end."""
        ...

    def open_input(self) -> "pa.NativeFile":
        """Read back what was written so far, before it is published."""
        ...

    def create(self) -> ObjectInfo:
        """Publish; raises ObjectExistsError when the name is taken (nothing is overwritten)."""
        ...

    def replace(self, *, etag: str | None = None) -> ObjectInfo:
        """Publish over what is there; raises PreconditionFailedError when `etag` is given and is no longer its etag."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Storage(Protocol):
    """Objects by uri. All failures are StorageError and name the uri. Equal ones reach the same objects."""

    def __hash__(self) -> int: ...

    def open_input(self, uri: str, *, etag: str | None = None) -> "pa.NativeFile":
        """Open for random access (ranged reads); the caller closes it.

        Raises:
            SourceChangedError: `etag` is given and is not, or no longer, the object's: now, or at a later read.
            StorageError: it is missing or cannot be read.
        """
        ...

    def stat(self, uri: str) -> ObjectInfo | None:
        """None: there is no such object."""
        ...

    def list(self, folder: str) -> list[ObjectInfo]:
        """Objects below `folder`, at any depth, in the order of their uri. Empty when there is no such folder."""
        ...

    def stage(self, uri: str) -> StagedObject:
        """Begin to write an object."""
        ...

    def creates_atomically(self, folder: str) -> bool:
        """Whether `create` below `folder` refuses a taken name also when several write at once."""
        ...

    def copy(self, source: str, target: str) -> None:
        """Copy an object over another name, whatever is there, without a moment in which half of it can be seen."""
        ...

    def delete(self, uri: str) -> None:
        """Remove an object; none there is no error."""
        ...

    def sweep(self, folder: str) -> None:
        """Remove unpublished writes below `folder`: what this program left when it was killed."""
        ...

    def remove_empty_folders(self, folder: str) -> None:
        """Remove `folder` and those below it as far as they are empty; where folders are only names, do nothing."""
        ...
