"""Which rows of a shard were in the engine when an attempt ended: to count what a crash made us compute again, and to
find the row that takes the whole process along (a row that ends only the engine is found by isolation.py).

Rows enter the engine in file order, so one number says which had entered: all up to it. It stands in a small file
beside the checkpoints, written with each of them and at most every MARK_S in between; what a crash leaves unsaid of
the last moment is not counted.

After two deaths in a row without progress, the rows that were inside are suspects: an attempt then runs all other
rows first and the suspects last, in two windows, each named in the file before it starts. Dying in a window leaves
that window as the suspects of the next attempt. A window of one that two attempts have died with is convicted.
"""

import json
import logging
import time
from collections.abc import Collection, Sequence

from nightmill.errors import StorageError
from nightmill.output.folder import OutputFolder, shard_folder
from nightmill.storage import Storage

log = logging.getLogger(__name__)

MARK_S = 0.2
SUSPECT_AFTER = 2  # deaths in a row without a newly durable row
CONVICT_AFTER = 2  # deaths with one row alone: the first may have been somebody's kill -9


class InflightMark:
    """One shard's mark."""

    def __init__(self, storage: Storage, folder: OutputFolder, shard_index: int) -> None:
        self._storage = storage
        self._uri = f"{shard_folder(folder.work, shard_index)}/inflight.json"
        self._before = -1  # row index, of earlier attempts
        self._window: tuple[int, ...] = ()  # that the last attempt died in
        self._tries = 0  # of that window
        self._last_row = -1
        self._written = -1
        self._written_at = float("-inf")

    def read(self) -> None:
        """Take over what earlier attempts have left."""
        if self._storage.stat(self._uri) is None:
            return
        try:
            with self._storage.open_input(self._uri) as file:
                fields = json.loads(file.read())
            self._before = int(fields["last_row"])
            self._window = tuple(int(row) for row in fields["window"])
            self._tries = int(fields["tries"])
        except (StorageError, ValueError, KeyError, TypeError) as error:
            log.warning("%s is not readable, so recomputed rows are not counted: %s", self._uri, error)
        self._last_row = self._written = self._before

    def covers(self, row_index: int) -> bool:
        """Whether an earlier attempt had this row in the engine."""
        return row_index <= self._before

    def suspects(self, missing: Collection[int], num_failures: int) -> tuple[int, ...]:
        """Rows to run last and in windows, in order; usually none."""
        inside = self._window
        if not inside and num_failures >= SUSPECT_AFTER:
            inside = tuple(sorted(row for row in missing if self.covers(row)))
        return tuple(row for row in inside if row in missing)

    def is_convicted(self, suspects: Sequence[int]) -> bool:
        """Whether this one row alone has ended enough attempts."""
        return len(suspects) == 1 and self._window == tuple(suspects) and self._tries >= CONVICT_AFTER

    def reach(self, row_index: int) -> None:
        """A row has entered the engine."""
        self._last_row = max(self._last_row, row_index)
        if time.monotonic() - self._written_at >= MARK_S:
            self.write()

    def write(self) -> None:
        """Say how far it is, if that is news."""
        if self._last_row > self._written:
            self._put(self._window, self._tries)

    def begin_window(self, window: Sequence[int]) -> None:
        """These rows, and no other suspects, run from now on."""
        same = self._window == tuple(window)
        self._put(window, self._tries + 1 if same else 1)

    def end_windows(self) -> None:
        """Nobody is suspected any more."""
        if self._window:
            self._put((), 0)

    def end_in_order(self) -> None:
        """The attempt stops before its end, but not by a death: nobody is to blame for it."""
        if self._tries:
            self._put(self._window, 0)

    def _put(self, window: Sequence[int], tries: int) -> None:
        self._window, self._tries = tuple(window), tries
        with self._storage.stage(self._uri) as staged:
            staged.file.write(json.dumps({"last_row": self._last_row, "window": list(window), "tries": tries}).encode())
            staged.replace()
        self._written, self._written_at = self._last_row, time.monotonic()


def windows(suspects: Sequence[int]) -> list[tuple[int, ...]]:
    """The two halves of the suspects; one of one."""
    middle = (len(suspects) + 1) // 2
    return [half for half in (tuple(suspects[:middle]), tuple(suspects[middle:])) if half]
