"""Which requests may run after an engine died: the search for the row that kills it.

The suspects are the requests that had started in the engine. They run in ever smaller windows, and nothing
else beside them:

    crash with  a b c d e f g h        suspects: all eight
    run         a b c d                finished: cleared, so it is among e f g h
    run         e f                    crash: only e f are left
    run         e                      finished
    run         f                      crash, alone: f is the culprit

One culprit among n costs at most 2 + log2(n) crashes. A crash that had nothing to do with a row (the kernel killed
the process for its memory) clears everybody in as many windows and no row is blamed.

A process does not send itself SIGKILL: the kernel did, for whoever wanted the memory, or a person. One such death of a
row that runs alone may be somebody else's doing, so it takes CONVICT_AFTER_KILLS of them, with no other crash between.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

CONVICT_AFTER_KILLS = 3


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a crash has shown."""

    culprit: int | None  # the request that crashed alone
    cleared: tuple[int, ...]  # no longer suspected: run them with everybody else


class Isolation:
    """The windows still to be tried, at most two; the first one is running."""

    def __init__(self) -> None:
        self._windows: list[tuple[int, ...]] = []
        self._kills_alone = 0  # of the one request in the window

    @property
    def active(self) -> bool:
        """Whether only `window` may run."""
        return bool(self._windows)

    @property
    def window(self) -> tuple[int, ...]:
        """The requests that may run now, and nothing else; empty when everything may."""
        return self._windows[0] if self._windows else ()

    @property
    def suspects(self) -> tuple[int, ...]:
        """The requests of all windows."""
        return tuple(i for window in self._windows for i in window)

    def crashed(self, in_flight: Sequence[int], *, is_kill: bool = False) -> Verdict:
        """The engine died with these started: they are the suspects now, everybody else is cleared.

        `is_kill`: by SIGKILL, which need not be a row's doing.
        """
        if not in_flight:
            return Verdict(None, ())
        suspects = tuple(in_flight)
        cleared = tuple(i for window in self._windows for i in window if i not in set(suspects))
        # Only a window of one convicts: a first crash with one request inside may have been anything.
        is_alone = self.window == suspects and len(suspects) == 1
        self._kills_alone = self._kills_alone + 1 if is_alone and is_kill else 0
        if is_alone and (not is_kill or self._kills_alone == CONVICT_AFTER_KILLS):
            self._windows, self._kills_alone = [], 0
            return Verdict(suspects[0], cleared)
        self._windows = _halves(suspects)
        return Verdict(None, cleared)

    def settled(self, request_ids: Iterable[int]) -> None:
        """These ended without a crash (finished, cancelled). An emptied window brings up the next."""
        ended = set(request_ids)
        if ended.intersection(self.window):
            self._kills_alone = 0
        windows = [tuple(i for i in window if i not in ended) for window in self._windows]
        left = [window for window in windows if window]
        # The first half is clear, so the culprit is in the second: halve it without paying for a crash.
        self._windows = _halves(left[0]) if len(left) == 1 and len(windows) == 2 else left


def _halves(suspects: tuple[int, ...]) -> list[tuple[int, ...]]:
    middle = (len(suspects) + 1) // 2
    return [half for half in (suspects[:middle], suspects[middle:]) if half]
