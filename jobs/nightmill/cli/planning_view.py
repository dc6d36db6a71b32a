"""How far the look at a job's input files has come: a line now and then, or one that is redrawn on a terminal."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

import click

from nightmill.cli.show import show_note
from nightmill.submit import PlanProgress

FIRST_S, EVERY_S = 1.0, 5.0  # a few files are looked at before anybody asks
REDRAW_S = 0.2


class PlanningLines:
    """Call it with each step: `say` gets a text when the last one is old enough."""

    def __init__(self, say: Callable[[str], None], *, first_s: float = FIRST_S, every_s: float = EVERY_S) -> None:
        self._say = say
        self._every_s = every_s
        self._next_at = time.monotonic() + first_s

    def __call__(self, what: str, done: int, total: int) -> None:
        """So many files of so many have been looked at, for this."""
        now = time.monotonic()
        if now >= self._next_at:
            self._next_at = now + self._every_s
            self._say(f"planning: {what}, {done:,} of {total:,} files")


@contextlib.contextmanager
def planning_view(*, quiet: bool) -> Iterator[PlanProgress]:
    """What to give to `submit_and_ring` as `progress`."""
    if quiet:
        yield _nothing
    elif not sys.stderr.isatty():
        yield PlanningLines(show_note)
    else:
        try:
            yield PlanningLines(_redraw, first_s=REDRAW_S, every_s=REDRAW_S)
        finally:
            _redraw("")


def _redraw(text: str) -> None:
    click.echo(f"\r\x1b[K{text}", nl=False, err=True)


def _nothing(what: str, done: int, total: int) -> None:
    """Say nothing."""
