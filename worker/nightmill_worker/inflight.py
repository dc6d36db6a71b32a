"""Which rows of a shard were in the engine when an attempt ended: to count what a crash made us compute again, and to
find the row that takes the whole process along (a row that ends only the engine is found by isolation.py).

Rows start in the order the engine plans, not in the file's, so the mark is a set: the rows that have started and have
no durable answer. It stands in a small file beside the checkpoints, written with each of them and at most every MARK_S
in between (less often where writing takes long), but not with an attempt's last one: nothing runs any more then. What
a crash leaves unsaid of the last moment is not counted. Rows that wait in the engine have not started.

After two deaths in a row without progress, the rows that were inside are suspects: an attempt then runs all other
rows first and the suspects last, in two windows, each named in the file before it starts. Dying in a window leaves
that window as the suspects of the next attempt; the other suspects are parked until it has been searched to its end,
for there may be more culprits than one. A window of one that two attempts have died with is convicted.
"""

import json
import logging
import time
from collections.abc import Collection, Iterable, Sequence

from nightmill.errors import StorageError
from nightmill.output.folder import shard_folder
from nightmill.storage import Storage

log = logging.getLogger(__name__)

MARK_S = 0.2
NAME = "inflight.json"
PATIENCE = 5.0  # times what a write takes, between two: a slow store is not kept busy with marks
SUSPECT_AFTER = 2  # deaths in a row without a newly durable row
CONVICT_AFTER = 2  # deaths with one row alone: the first may have been somebody's kill -9


class InflightMark:
    """One shard's mark."""

    def __init__(self, storage: Storage, directory: str, shard_index: int) -> None:
        self._storage = storage
        self._uri = f"{shard_folder(directory, shard_index)}/{NAME}"
        self._before: frozenset[int] = frozenset()  # row indices, of earlier attempts
        self._window: tuple[int, ...] = ()  # that the last attempt died in
        self._tries = 0  # of that window
        self._open: set[int] = set()  # started in this attempt or an earlier one, not durable
        self._is_news = False
        self._next_at = float("-inf")  # of a write between checkpoints

    def read(self, names: Collection[str]) -> None:
        """Take over what earlier attempts have left. `names`: of the files in the shard's folder."""
        if NAME not in names:
            return
        try:
            with self._storage.open_input(self._uri) as file:
                fields = json.loads(file.read())
            self._before = frozenset(row for first, end in fields["started"] for row in range(first, end))
            self._window = tuple(int(row) for row in fields["window"])
            self._tries = int(fields["tries"])
        except (StorageError, ValueError, KeyError, TypeError) as error:
            log.warning("%s is not readable, so recomputed rows are not counted: %s", self._uri, error)
        self._open = set(self._before)

    def covers(self, row_index: int) -> bool:
        """Whether an earlier attempt had this row in the engine, and lost it."""
        return row_index in self._before

    def suspects(self, missing: Collection[int], num_failures: int) -> tuple[int, ...]:
        """Rows to run last and in windows, in order; usually none."""
        inside = tuple(row for row in self._window if row in missing)
        if not inside and num_failures >= SUSPECT_AFTER:
            inside = tuple(sorted(row for row in missing if self.covers(row)))
        return inside

    def parked(self, missing: Collection[int], suspects: Collection[int]) -> tuple[int, ...]:
        """Rows to run after the suspects, in windows like them: they were inside, too, and nothing has cleared them.

        Beside the innocent, a second culprit among them would end every attempt before the window begins.
        """
        if not suspects:
            return ()
        return tuple(sorted(row for row in missing if self.covers(row) and row not in suspects))

    def is_convicted(self, suspects: Sequence[int]) -> bool:
        """Whether this one row alone has ended enough attempts."""
        return len(suspects) == 1 and self._window == tuple(suspects) and self._tries >= CONVICT_AFTER

    def start(self, row_indices: Iterable[int]) -> None:
        """Rows have started, or are about to."""
        known = len(self._open)
        self._open.update(row_indices)
        self._is_news |= len(self._open) > known
        if time.monotonic() >= self._next_at:
            self.write()

    def settle(self, row_indices: Iterable[int]) -> None:
        """Rows are durable. Not worth a write: whoever reads the mark knows what is durable."""
        self._open.difference_update(row_indices)

    def write(self) -> None:
        """Say what has started, if that is news."""
        if self._is_news:
            self._put(self._window, self._tries)

    def narrows(self, window: Sequence[int]) -> bool:
        """Whether this window says more than the one that the last attempt died in."""
        return not self._window or set(window) < set(self._window)

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
        begun_at = time.monotonic()
        fields = {"started": _ranges(self._open), "window": list(window), "tries": tries}
        with self._storage.stage(self._uri) as staged:
            staged.file.write(json.dumps(fields).encode())
            staged.replace()
        now = time.monotonic()
        self._is_news, self._next_at = False, now + max(MARK_S, PATIENCE * (now - begun_at))


def windows(suspects: Sequence[int]) -> list[tuple[int, ...]]:
    """The two halves of the suspects; one of one."""
    middle = (len(suspects) + 1) // 2
    return [half for half in (tuple(suspects[:middle]), tuple(suspects[middle:])) if half]


def _ranges(row_indices: Collection[int]) -> list[tuple[int, int]]:
    """[first, end) of every run of successive rows, ascending."""
    ranges: list[tuple[int, int]] = []
    for row in sorted(row_indices):
        if ranges and ranges[-1][1] == row:
            ranges[-1] = (ranges[-1][0], row + 1)
        else:
            ranges.append((row, row + 1))
    return ranges
