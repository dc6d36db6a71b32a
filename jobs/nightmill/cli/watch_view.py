"""A job that is being watched, as shown: redrawn in place, as lines for logs, or as JSON lines."""

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from nightmill.cli.job_view import job_object
from nightmill.cli.show import show_json, show_note
from nightmill.durations import clock
from nightmill.progress import STALE_S, JobProgress
from nightmill.states import ShardState

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


class WatchView(Protocol):
    """Told about a job; a context manager that gives the terminal back."""

    def show(self, progress: JobProgress) -> None:
        """A look at the job."""
        ...

    def trouble(self, text: str) -> None:
        """The store did not answer."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def terminal_view(*, every_s: float, as_json: bool = False, quiet: bool = False) -> WatchView:
    """The view that fits: JSON lines on stdout, nothing, a live one on a terminal, or lines on stderr."""
    if as_json:
        return JsonView(every_s)
    if quiet:
        return NoView()
    return LiveView() if sys.stderr.isatty() else LineView(every_s)


class NoView:
    """Shows nothing but trouble."""

    def show(self, progress: JobProgress) -> None:
        """Nothing."""

    def trouble(self, text: str) -> None:
        """A line: whoever waits should know why nothing moves."""
        show_note(f"the job store does not answer, trying again: {text}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to give back."""


class LineView(NoView):
    """A line every `every_s`, and one for each new status."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._said_at = float("-inf")
        self._status: object = None

    def show(self, progress: JobProgress) -> None:
        """A line, if the last one is old enough or the status is new."""
        if progress.job.status is self._status and progress.at - self._said_at < self._every_s:
            return
        self._said_at, self._status = progress.at, progress.job.status
        self.line(progress)

    def line(self, progress: JobProgress) -> None:
        """Write it."""
        show_note(f"{progress.job.status.value}  {'  '.join([rows_text(progress), *rate_texts(progress)])}")


class JsonView(LineView):
    """OpenAI's batch object with our fields and the rates, one a line, on stdout."""

    def line(self, progress: JobProgress) -> None:
        """Write it."""
        show_json(progress_object(progress))


class LiveView(NoView):
    """A few lines that are redrawn in place, on stderr."""

    def __init__(self, console: "Console | None" = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = console or Console(stderr=True)
        self._live = Live(console=self._console, transient=True, refresh_per_second=4)

    def show(self, progress: JobProgress) -> None:
        """Redraw."""
        self._live.update(live_lines(progress))

    def trouble(self, text: str) -> None:
        """A line above."""
        self._console.print(f"the job store does not answer, trying again: {text}", markup=False, highlight=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()


def live_lines(progress: JobProgress) -> "RenderableType":
    """What the live view draws."""
    from rich.console import Group, RenderableType
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    job = progress.job
    bar = Table.grid(padding=(0, 2))
    bar.add_row(ProgressBar(total=max(job.rows.total, 1), completed=progress.rows_done, width=24), rows_text(progress))
    lines: list[RenderableType] = [
        Text(f"{job.job_id}  {job.status.value}, tier {job.options.tier.value}", style="bold"),
        bar,
    ]
    if job.finished_at is None:
        lines.append(Text("  ".join(rate_texts(progress)) or "no rows have run yet"))
    lines.append(Text(f"shards  {shards_text(progress)}"))
    if progress.silent_s >= STALE_S:
        lines.append(Text(f"nothing has moved for {clock(progress.silent_s)}", style="yellow"))
    lines.append(Text(f"{job.spec.model.model} → {job.spec.output}", style="dim", overflow="ellipsis", no_wrap=True))
    return Group(*lines)


def rows_text(progress: JobProgress) -> str:
    """`12,345/60,000 rows (20.6 %)  14 failed`."""
    rows = progress.job.rows
    percent = 100 * progress.rows_done / rows.total if rows.total else 0.0
    text = f"{progress.rows_done:,}/{rows.total:,} rows ({percent:.1f} %)"
    return f"{text}  {rows.failed:,} failed" if rows.failed else text


def rate_texts(progress: JobProgress) -> list[str]:
    """`41.2 rows/s`, `3,120 tokens/s`, `128 running`, `ETA 19:17`; nothing of a job that does not run."""
    if progress.job.finished_at is not None or progress.job.started_at is None:
        return []
    rate, tokens = progress.rows_per_s, progress.tokens_per_s
    return [
        "rows/s unknown" if rate is None else f"{rate:,.1f} rows/s",
        "tokens/s unknown" if tokens is None else f"{tokens:,.0f} tokens/s",
        f"{progress.job.rows_running:,} running",
        f"ETA {clock(progress.eta_s)}",
    ]


def shards_text(progress: JobProgress) -> str:
    """`3 leased, 7 available, 20 committed`."""
    states = progress.job.num_shards_by_state
    return ", ".join(f"{states[state]:,} {state.value}" for state in ShardState if states.get(state)) or "none"


def progress_object(progress: JobProgress) -> dict[str, object]:
    """The batch object and the rates."""
    return {
        **job_object(progress.job),
        "rows_per_s": progress.rows_per_s,
        "tokens_per_s": progress.tokens_per_s,
        "eta_s": progress.eta_s,
    }
