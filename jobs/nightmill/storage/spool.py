"""What is written before it is uploaded: in memory while it is small, else in an unnamed file in TMPDIR."""

import errno
import shutil
import tempfile
from typing import IO, Any, BinaryIO

from nightmill.errors import StorageError
from nightmill.storage.positioned import PositionedReader

MAX_MEMORY_BYTES = 2**20
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def open_spool() -> BinaryIO:
    """A file to write, then to read from its start. It has no name: a killed process leaves nothing."""
    spool: Any = tempfile.SpooledTemporaryFile(max_size=MAX_MEMORY_BYTES, prefix="nightmill-")  # noqa: SIM115
    return spool  # type: ignore[no-any-return]


def spool_error(error: OSError, uri: str) -> StorageError:
    """What to say when the spool of an upload cannot be written or read."""
    folder = tempfile.gettempdir()
    if error.errno in _NO_SPACE:
        free = shutil.disk_usage(folder).free
        return StorageError(
            f"cannot write {uri}: no space left in the temporary folder {folder}"
            f" ({error.strerror}; {free:,} bytes free), where it is put together before the upload",
            hint="Finished rows are kept. Point TMPDIR at a larger disk, then run the same command again: it resumes.",
        )
    return StorageError(
        f"cannot write {uri}: the temporary folder {folder} failed: {error.strerror or error}", hint="Check TMPDIR."
    )


class SpoolView(PositionedReader):
    """A second, read-only position in a spool that is being written. One thread uses both."""

    def __init__(self, spool: IO[bytes]) -> None:
        super().__init__()
        self._spool = spool
        self._size = spool.tell()
        self._position = 0

    def read(self, size: int = -1) -> bytes:
        """As much as asked for, or up to what was written."""
        left = max(self._size - self._position, 0)
        self._spool.seek(self._position)
        try:
            data = self._spool.read(left if size is None or size < 0 else min(size, left))
        finally:
            self._spool.seek(self._size)  # where the writer goes on
        self._position += len(data)
        return data
