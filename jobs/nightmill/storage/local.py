"""The local disk as a Storage: temporary, fsync, hard link, fsync of the folder."""

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, Self

from nightmill.errors import StorageError
from nightmill.storage.location import absolute
from nightmill.storage.protocol import ObjectExistsError, ObjectInfo, PreconditionFailedError, changed

if TYPE_CHECKING:
    # Imported where a file is opened: commands that only spell locations start without Arrow.
    import pyarrow as pa

_TEMPORARY_PREFIX = ".nightmill-"
_TEMPORARY_SUFFIX = ".tmp"
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EMLINK})


@dataclass(frozen=True)
class LocalStorage:
    """Files on a disk that has hard links. A uri is a path or `file://` and a path."""

    def open_input(self, uri: str, *, etag: str | None = None) -> "pa.NativeFile":
        """Open for random access. What is open stays as it is when another file takes the name."""
        with _explained(uri, "read"):
            file = _random_access(absolute(uri))
            if etag is not None and (found := _info(Path(absolute(uri))).etag) != etag:
                file.close()
                raise changed(uri, expected=etag, found=found)
            return file

    def stat(self, uri: str) -> ObjectInfo | None:
        """None when there is no such file (a folder is none)."""
        path = Path(absolute(uri))
        with _explained(uri, "read"):
            try:
                return _info(path) if path.is_file() else None
            except FileNotFoundError:
                return None

    def list(self, folder: str) -> list[ObjectInfo]:
        """Files below `folder`, without the unpublished ones; links are followed."""
        found = []
        with _explained(folder, "list"):
            for path in _walk(Path(absolute(folder)), follow_links=True):
                if _is_temporary(path.name):
                    continue
                try:
                    found.append(_info(path))
                except FileNotFoundError:  # it went just now; or it is a link, and then data is missing
                    if path.is_symlink() and not path.name.startswith("."):
                        raise StorageError(f"{path} is a link to a file that is not there") from None
        return sorted(found, key=lambda info: info.uri)

    def stage(self, uri: str) -> "LocalStagedObject":
        """Write to a temporary in the same folder: hard links do not cross file systems."""
        return LocalStagedObject(uri)

    def creates_atomically(self, folder: str) -> bool:
        """Hard links do."""
        return True

    def copy(self, source: str, target: str) -> None:
        """By way of a temporary, with a rename at the end."""
        with self.stage(target) as staged, _explained(source, "read"), Path(absolute(source)).open("rb") as file:
            shutil.copyfileobj(file, staged.file, 2**20)
            staged.replace()

    def delete(self, uri: str) -> None:
        """Remove a file."""
        with _explained(uri, "delete"):
            Path(absolute(uri)).unlink(missing_ok=True)

    def sweep(self, folder: str) -> None:
        """Remove temporaries below `folder` whose writer is dead."""
        with _explained(folder, "clean"):
            for path in list(_walk(Path(absolute(folder)))):
                if _is_temporary(path.name) and not _is_being_written(path):
                    path.unlink(missing_ok=True)

    def remove_empty_folders(self, folder: str) -> None:
        """Deepest first."""
        for parent, _, _ in os.walk(absolute(folder), topdown=False):
            with contextlib.suppress(OSError):  # not empty: it holds something that stays
                Path(parent).rmdir()


class LocalStagedObject:
    """A temporary file that becomes the object by a hard link."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._path = Path(absolute(uri))
        self._temporary = self._path.with_name(
            f"{_TEMPORARY_PREFIX}{self._path.name}-{secrets.token_hex(6)}{_TEMPORARY_SUFFIX}"
        )
        with _explained(uri, "write"):
            _make_folder(self._path.parent)
            # Buffered: a raw file may write less than it was given, and Arrow does not look.
            self._file = self._temporary.open("xb")
            # Tells a sweep that somebody is writing here; the kernel lets go of it when the process dies.
            with contextlib.suppress(OSError):  # a file system without locks: then nothing is swept there
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    @property
    def file(self) -> BinaryIO:
        """The temporary, open for writing."""
        return self._file

    def open_input(self) -> "pa.NativeFile":
        """Read the temporary back."""
        with _explained(self._uri, "read back"):
            self._file.flush()
            return _random_access(str(self._temporary))

    def create(self) -> ObjectInfo:
        """Hard-link the temporary to the final name: the kernel refuses when the name is taken."""
        with _explained(self._uri, "write"):
            self._file.flush()
            os.fsync(self._file.fileno())
            try:
                os.link(self._temporary, self._path)
            except FileExistsError:
                raise ObjectExistsError(f"{self._uri} exists already") from None
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                raise StorageError(
                    f"cannot create {self._uri}: this file system has no hard links ({error.strerror})",
                    hint="Choose an output folder on a local disk (ext4, xfs, btrfs, APFS).",
                ) from error
            _sync_folder(self._path.parent)
            return _info(self._path)

    def replace(self, *, etag: str | None = None) -> ObjectInfo:
        """Rename over the final name. The check is not atomic: the caller holds the shard's lease."""
        with _explained(self._uri, "write"):
            self._file.flush()
            os.fsync(self._file.fileno())
            if etag is not None:
                current = _info(self._path).etag if self._path.exists() else None
                if current != etag:
                    raise PreconditionFailedError(f"{self._uri} has changed: its etag is {current}, not {etag}")
            self._temporary.replace(self._path)
            _sync_folder(self._path.parent)
            return _info(self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._temporary.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # what create() did not flush is not wanted any more
            self._file.close()
        if isinstance(error, OSError):
            raise _explain(error, self._uri, "write") from error


@contextlib.contextmanager
def _explained(uri: str, action: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _explain(error, uri, action) from error


def _explain(error: OSError, uri: str, action: str) -> StorageError:
    if error.errno in _NO_SPACE:
        folder = Path(absolute(uri)).parent
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free
        return StorageError(
            f"cannot {action} {uri}: no space left ({error.strerror}; {free:,} bytes free on the disk of {folder})",
            hint="Finished rows are kept. Make space, then run the same command again: it resumes.",
        )
    if isinstance(error, FileNotFoundError):
        return StorageError(f"cannot {action} {uri}: there is no such file")
    return StorageError(f"cannot {action} {uri}: {error.strerror or error}")


def _random_access(path: str) -> "pa.NativeFile":
    import pyarrow as pa

    return pa.OSFile(path, "rb")


def _info(path: Path) -> ObjectInfo:
    status = path.stat()
    return ObjectInfo(uri=str(path), size_bytes=status.st_size, etag=f"{status.st_mtime_ns}-{status.st_size}")


def _walk(root: Path, *, follow_links: bool = False) -> Iterator[Path]:
    entered = {root.resolve()}
    for parent, folders, names in os.walk(root, followlinks=follow_links):
        for name in names:
            yield Path(parent, name)
        if follow_links:
            # A link to a folder further up would never end.
            real = {name: Path(parent, name).resolve() for name in folders}
            folders[:] = [name for name in folders if real[name] not in entered]
            entered.update(real[name] for name in folders)


def _is_temporary(name: str) -> bool:
    return name.startswith(_TEMPORARY_PREFIX) and name.endswith(_TEMPORARY_SUFFIX)


def _is_being_written(temporary: Path) -> bool:
    try:
        with temporary.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:  # locked, or no locks here
        return True
    return False


def _make_folder(folder: Path) -> None:
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for new in reversed(missing):
        new.mkdir(exist_ok=True)
        _sync_folder(new.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
