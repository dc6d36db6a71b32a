"""`nightmill watch --all`: every job that has not ended, and what that is by tier."""

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from nightmill.cli.show import show_json, show_note
from nightmill.cli.watch_view import progress_object
from nightmill.durations import clock
from nightmill.errors import StoreError
from nightmill.progress import JobProgress, ProgressMeter
from nightmill.records import JobInfo
from nightmill.states import TERMINAL_JOB, JobStatus, ShardState, Tier
from nightmill.store import Store
from nightmill.waiting import PATIENCE_S

if TYPE_CHECKING:
    from rich.console import RenderableType

LOOK_S = 2.0
MAX_JOBS = 200
MAX_SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class TierProgress:
    """The jobs of one tier, added up."""

    tier: str
    jobs: int
    rows_left: int
    rows_running: int
    shards_available: int
    shards_leased: int
    rows_per_s: float | None  # None: of no job known
    tokens_per_s: float | None


def by_tier(jobs: Sequence[JobProgress]) -> list[TierProgress]:
    """One for each tier, the most urgent first, also for those without a job."""
    return [_tier([p for p in jobs if p.job.options.tier is tier], tier) for tier in Tier]


def _tier(jobs: Sequence[JobProgress], tier: Tier) -> TierProgress:
    states: Counter[ShardState] = Counter()
    for progress in jobs:
        states.update(progress.job.num_shards_by_state)
    rows = [p.rows_per_s for p in jobs if p.rows_per_s is not None]
    tokens = [p.tokens_per_s for p in jobs if p.tokens_per_s is not None]
    return TierProgress(
        tier=tier.value,
        jobs=len(jobs),
        rows_left=sum(p.job.rows.total - p.rows_done for p in jobs),
        rows_running=sum(p.job.rows_running for p in jobs),
        shards_available=states[ShardState.AVAILABLE],
        shards_leased=states[ShardState.LEASED],
        rows_per_s=sum(rows) if rows else None,
        tokens_per_s=sum(tokens) if tokens else None,
    )


def watch_fleet(store: Store, *, every_s: float, as_json: bool) -> None:
    """Show all jobs until none is left."""
    live = sys.stderr.isatty() and not as_json
    said_at = float("-inf")
    with ExitStack() as stack:
        if live:
            from rich.console import Console
            from rich.live import Live

            display = stack.enter_context(Live(console=Console(stderr=True), transient=True, refresh_per_second=4))
        for jobs in _looks(store):
            if live:
                display.update(fleet_table(jobs))
            elif time.monotonic() - said_at >= every_s:
                said_at = time.monotonic()
                _say(jobs, as_json=as_json)
    show_note("no job is queued or in progress")


def _looks(store: Store) -> Iterator[list[JobProgress]]:
    meters: dict[str, ProgressMeter] = {}
    answered = float("-inf")
    while True:
        try:
            jobs = live_jobs(store)
        except StoreError as error:
            if time.monotonic() - answered > PATIENCE_S:
                raise
            show_note(f"the job store does not answer, trying again: {error.message}")
            continue
        at = answered = time.monotonic()
        if not jobs:
            return
        meters = {job.job_id: meters.get(job.job_id) or ProgressMeter() for job in jobs}
        yield [meters[job.job_id].look(job, at) for job in jobs]
        time.sleep(LOOK_S)


def live_jobs(store: Store) -> list[JobInfo]:
    """Jobs that have not ended: by tier, then the oldest first."""
    statuses = [status for status in JobStatus if status not in TERMINAL_JOB]
    found = {job.job_id: job for status in statuses for job in store.jobs(MAX_JOBS, status)}
    return sorted(found.values(), key=lambda job: (job.options.tier.rank, job.created_at))


def _say(jobs: Sequence[JobProgress], *, as_json: bool) -> None:
    if as_json:
        show_json({"tiers": [asdict(t) for t in by_tier(jobs)], "jobs": [progress_object(p) for p in jobs]})
        return
    tiers = [
        f"{t.tier}: {t.jobs} jobs, {t.rows_left:,} rows left, {t.shards_leased} shards leased, {_rate(t.rows_per_s)}"
        for t in by_tier(jobs)
        if t.jobs
    ]
    show_note("  ".join(tiers))


def _rate(rate: float | None) -> str:
    return "rows/s unknown" if rate is None else f"{rate:,.1f} rows/s"


def fleet_table(jobs: Sequence[JobProgress]) -> "RenderableType":
    """What the live view draws: tiers, then the first jobs."""
    from rich import box
    from rich.console import Group
    from rich.table import Table

    tiers = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("TIER", "JOBS", "ROWS LEFT", "RUNNING", "AVAILABLE", "LEASED", "ROWS/S", "TOKENS/S"):
        tiers.add_column(name, justify="left" if name == "TIER" else "right", no_wrap=True)
    for t in by_tier(jobs):
        counts = (t.jobs, t.rows_left, t.rows_running, t.shards_available, t.shards_leased)
        tiers.add_row(t.tier, *(f"{count:,}" for count in counts), _cell(t.rows_per_s, 1), _cell(t.tokens_per_s, 0))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("JOB", "TIER", "STATUS", "DONE", "ROWS", "ETA"):
        table.add_column(name, justify="right" if name in ("DONE", "ROWS", "ETA") else "left", no_wrap=True)
    for p in jobs[:MAX_SHOWN]:
        done = f"{100 * p.rows_done / max(p.job.rows.total, 1):.1f} %"
        values = (p.job.job_id, p.job.options.tier.value, p.job.status.value, done, f"{p.job.rows.total:,}")
        table.add_row(*values, clock(p.eta_s))
    if len(jobs) > MAX_SHOWN:
        table.caption = f"and {len(jobs) - MAX_SHOWN} more: nightmill list"
    return Group(tiers, table)


def _cell(rate: float | None, digits: int) -> str:
    return "-" if rate is None else f"{rate:,.{digits}f}"
