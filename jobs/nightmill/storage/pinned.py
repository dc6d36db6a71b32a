"""The inputs of a job as they were planned: one that was overwritten since is an error, not other rows."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nightmill.records import SourceFile
from nightmill.storage.opening import open_storage
from nightmill.storage.protocol import ObjectInfo, StagedObject, Storage, changed

if TYPE_CHECKING:
    import pyarrow as pa


class PinnedStorage:
    """Reads a job's source files, wherever each lies, and only in the version that the plan saw. Writes nothing."""

    def __init__(self, sources: Sequence[SourceFile]) -> None:
        self._etags = {source.uri: source.etag for source in sources}

    def open_input(self, uri: str, *, etag: str | None = None) -> "pa.NativeFile":
        """Open the planned version.

        Raises:
            SourceChangedError: another one stands there.
        """
        planned = self._etags.get(uri)
        if planned is not None and etag is not None and etag != planned:
            raise changed(uri, expected=planned, found=etag)
        return open_storage(uri).open_input(uri, etag=planned or etag)

    def stat(self, uri: str) -> ObjectInfo | None:
        """As it stands now."""
        return open_storage(uri).stat(uri)

    def list(self, folder: str) -> list[ObjectInfo]:
        """As it stands now."""
        return open_storage(folder).list(folder)

    def stage(self, uri: str) -> StagedObject:
        """Sources are never written."""
        raise NotImplementedError(uri)

    def creates_atomically(self, folder: str) -> bool:
        """Sources are never written."""
        raise NotImplementedError(folder)

    def copy(self, source: str, target: str) -> None:
        """Sources are never written."""
        raise NotImplementedError(target)

    def delete(self, uri: str) -> None:
        """Sources are never written."""
        raise NotImplementedError(uri)

    def sweep(self, folder: str) -> None:
        """Sources are never written."""
        raise NotImplementedError(folder)

    def remove_empty_folders(self, folder: str) -> None:
        """Sources are never written."""
        raise NotImplementedError(folder)


def pinned(sources: Sequence[SourceFile]) -> Storage:
    """Give it as `storage=` to what reads a job's inputs: read_shard, read_range, write_part(source_storage=…)."""
    return PinnedStorage(sources)
