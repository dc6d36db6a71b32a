"""How far into a shard's rows earlier attempts had got: only to count what a crash made us compute again.

Rows enter the engine in file order, so one number says which had entered: all up to it. It stands in a small file
beside the checkpoints, written at most every MARK_S; what a crash leaves unsaid of the last moment is not counted.
"""

import json
import logging
import time

from nightmill.errors import StorageError
from nightmill.output.folder import OutputFolder, shard_folder
from nightmill.storage import Storage

log = logging.getLogger(__name__)

MARK_S = 0.5


class InflightMark:
    """One shard's mark."""

    def __init__(self, storage: Storage, folder: OutputFolder, shard_index: int) -> None:
        self._storage = storage
        self._uri = f"{shard_folder(folder.work, shard_index)}/inflight.json"
        self._before = -1  # row index: of earlier attempts
        self._now = -1
        self._written = -1
        self._written_at = float("-inf")

    def read(self) -> None:
        """Take over the mark of earlier attempts."""
        if self._storage.stat(self._uri) is None:
            return
        try:
            with self._storage.open_input(self._uri) as file:
                self._before = int(json.loads(file.read())["last_row"])
        except (StorageError, ValueError, KeyError, TypeError) as error:
            log.warning("%s is not readable, so recomputed rows are not counted: %s", self._uri, error)
        self._now = self._written = self._before

    def covers(self, row_index: int) -> bool:
        """Whether an earlier attempt had this row in the engine."""
        return row_index <= self._before

    def reach(self, row_index: int) -> None:
        """A row has entered the engine."""
        self._now = max(self._now, row_index)
        if self._now > self._written and time.monotonic() - self._written_at >= MARK_S:
            with self._storage.stage(self._uri) as staged:
                staged.file.write(json.dumps({"last_row": self._now}).encode())
                staged.replace()
            self._written, self._written_at = self._now, time.monotonic()
