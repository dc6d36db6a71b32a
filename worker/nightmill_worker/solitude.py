"""A row that takes the whole process along would take its neighbours' shards along: its shard searches alone.

Shards are inside together until one asks to be alone. From then on nobody else enters (they give their leases back,
which costs them nothing), and when those that were inside have ended, the one that asked goes on. So only its own
attempts are charged for the deaths of its search.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOOK_S = 0.2


class Solitude:
    """One for the shards of a process; used by their threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._is_wanted = False

    @property
    def is_wanted(self) -> bool:
        """Whether a shard is alone, or waits for it: start no other one."""
        return self._is_wanted

    def enter(self) -> bool:
        """Go in with the others; False when somebody wants to be alone: go away. Who is in, must `leave`."""
        with self._changed:
            if self._is_wanted:
                return False
            self._inside += 1
            return True

    def leave(self) -> None:
        """Go, with everything given back."""
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    @contextmanager
    def alone(self, goes_on: Callable[[], bool]) -> Iterator[bool]:
        """Wait until nobody else is inside, while `goes_on`; False when it ended first, or another was here before."""
        with self._changed:
            is_mine = not self._is_wanted
            if is_mine:
                self._is_wanted = True
                while self._inside > 1 and goes_on():
                    self._changed.wait(LOOK_S)
            is_granted = is_mine and self._inside == 1
        try:
            yield is_granted
        finally:
            if is_mine:
                with self._changed:
                    self._is_wanted = False
