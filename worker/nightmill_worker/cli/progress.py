"""Progress on stderr: one live line on a terminal, a line every few seconds elsewhere."""

import sys
import time
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from nightmill.cli.show import show_note
from nightmill.durations import clock
from nightmill_worker.report import Reporter, RunProgress, SilentReporter

PLAIN_EVERY_S = 5.0


class ProgressReporter(Reporter, AbstractContextManager["ProgressReporter"]):
    """A Reporter that gives the terminal back when its `with` ends."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to give back."""


def terminal_reporter(*, quiet: bool) -> ProgressReporter:
    """The reporter that fits this stderr."""
    if quiet:
        return QuietReporter()
    return LiveReporter() if sys.stderr.isatty() else PlainReporter()


class QuietReporter(SilentReporter, ProgressReporter):
    """Nothing: errors still come as errors."""

    def __enter__(self) -> Self:
        return self


class PlainReporter(ProgressReporter):
    """Lines, for logs."""

    def __init__(self, every_s: float = PLAIN_EVERY_S) -> None:
        self._every_s = every_s
        self._said_at = float("-inf")

    def __enter__(self) -> Self:
        return self

    def phase(self, text: str) -> None:
        """A line."""
        show_note(text)

    def note(self, text: str) -> None:
        """A line."""
        show_note(text)

    def progress(self, progress: RunProgress) -> None:
        """A line, if the last one is old enough."""
        now = time.monotonic()
        if now - self._said_at >= self._every_s:
            self._said_at = now
            done = progress.rows_completed + progress.rows_failed
            show_note(f"{done:,}/{progress.rows_total:,} rows  {_rates(progress)}")


class LiveReporter(ProgressReporter):
    """A bar that is redrawn in place."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[count]}"),
            TextColumn("{task.fields[rates]}"),
            console=self._console,
            transient=True,
            refresh_per_second=5,
        )
        self._task = self._bar.add_task("starting", total=None, count="", rates="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def phase(self, text: str) -> None:
        """The bar's caption."""
        self._bar.update(self._task, description=text, total=None, count="", rates="")

    def note(self, text: str) -> None:
        """A line above the bar."""
        self._console.print(text, markup=False, highlight=False)

    def progress(self, progress: RunProgress) -> None:
        """Move the bar."""
        done = progress.rows_completed + progress.rows_failed
        self._bar.update(
            self._task,
            description="rows",
            total=progress.rows_total,
            completed=done,
            count=f"{done:,}/{progress.rows_total:,}",
            rates=_rates(progress),
        )


def _rates(progress: RunProgress) -> str:
    parts = [
        f"{progress.rows_per_s:.1f} rows/s",
        f"{progress.tokens_per_s:,.0f} tokens/s",
        f"{progress.running} running, {progress.waiting} waiting",
        f"ETA {clock(progress.eta_s)}",
    ]
    if progress.rows_failed:
        parts.insert(0, f"{progress.rows_failed:,} failed")
    if progress.note:
        parts.append(progress.note)
    return "  ".join(parts)
