"""A Storage as a read-only filesystem of pyarrow: datasets get our endpoint, credentials and retries."""

from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.fs as pa_fs

from nightmill.storage import Storage


class StorageFileSystem(pa_fs.FileSystemHandler):  # type: ignore[misc]  # pyarrow has no types
    """Opens files and tells their size; paths are uris. Whatever writes is refused."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorageFileSystem) and other._storage == self._storage

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._storage)

    def get_type_name(self) -> str:
        """Shown in messages."""
        return "nightmill"

    def normalize_path(self, path: str) -> str:
        """A uri is as it is."""
        return path

    def open_input_file(self, path: str) -> pa.NativeFile:
        """For random access."""
        return self._storage.open_input(path)

    def open_input_stream(self, path: str) -> pa.NativeFile:
        """The same: reading from the start is one kind of access."""
        return self._storage.open_input(path)

    def get_file_info(self, paths: list[str]) -> list[pa_fs.FileInfo]:
        """Of files; there are no folders."""
        infos = []
        for path in paths:
            found = self._storage.stat(path)
            kind = pa_fs.FileType.NotFound if found is None else pa_fs.FileType.File
            infos.append(pa_fs.FileInfo(path, kind, size=None if found is None else found.size_bytes))
        return infos

    def get_file_info_selector(self, selector: pa_fs.FileSelector) -> NoReturn:
        """Parts are named one by one."""
        raise NotImplementedError("this filesystem is not listed")

    def _read_only(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("this filesystem is read-only")

    create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = _read_only
    delete_file = move = copy_file = open_output_stream = open_append_stream = _read_only
