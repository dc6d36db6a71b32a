"""What `watch` shows, at 80 columns."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console, RenderableType

from nightmill.cli.fleet_view import MAX_SHOWN, by_tier, fleet_table
from nightmill.cli.watch_view import JsonView, LineView, LiveView, live_lines, terminal_view
from nightmill.progress import JobProgress
from nightmill.records import JobInfo, JobOptions, RowCounts
from nightmill.states import JobStatus, ShardState, Tier

MakeInfo = Callable[..., JobInfo]


def drawn(what: RenderableType, width: int = 80) -> list[str]:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(what)
    return [line.rstrip() for line in console.export_text().splitlines()]


@pytest.fixture
def progress(make_info: MakeInfo) -> JobProgress:
    job = make_info(rows=RowCounts(total=60_000, completed=12_331, failed=14), rows_running=128)
    return JobProgress(job=job, rows_per_s=41.23, tokens_per_s=3120.4, eta_s=1157.0, silent_s=0.0, at=10.0)


def test_the_live_view_fits_80_columns(progress: JobProgress) -> None:
    lines = drawn(live_lines(progress))
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for words in (
        "job-20261129-g4kz7m2q  in_progress, tier normal",
        "12,345/60,000 rows (20.6 %)  14 failed",
        "41.2 rows/s  3,120 tokens/s  128 running  ETA 19:17",
        "7 available, 3 leased, 20 committed",
        "org/name → /out",
    ):
        assert words in text
    assert len(lines) == 5


def test_the_live_view_says_what_it_does_not_know(progress: JobProgress) -> None:
    text = "\n".join(drawn(live_lines(replace(progress, rows_per_s=None, tokens_per_s=None, eta_s=None, silent_s=95))))
    assert "rows/s unknown  tokens/s unknown  128 running  ETA unknown" in text
    assert "nothing has moved for 1:35" in text


def test_a_queued_job_is_shown_without_rates(make_info: MakeInfo) -> None:
    job = make_info(status=JobStatus.QUEUED, started_at=None)
    waiting = JobProgress(job=job, rows_per_s=None, tokens_per_s=None, eta_s=None, silent_s=0.0, at=0.0)
    text = "\n".join(drawn(live_lines(waiting)))
    assert "queued" in text
    assert "no rows have run yet" in text


def test_lines_come_every_few_seconds_and_with_each_new_status(
    progress: JobProgress, capsys: pytest.CaptureFixture[str]
) -> None:
    view = LineView(5.0)
    for at in (0.0, 1.0, 4.9, 5.0, 6.0):
        view.show(replace(progress, at=at))
    view.show(replace(progress, at=6.1, job=replace(progress.job, status=JobStatus.FINALIZING)))
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert [line.split()[0] for line in lines] == ["in_progress", "in_progress", "finalizing"]
    assert "41.2 rows/s  3,120 tokens/s  128 running  ETA 19:17" in lines[0]


def test_json_lines_on_stdout(progress: JobProgress, capsys: pytest.CaptureFixture[str]) -> None:
    view = JsonView(5.0)
    view.show(progress)
    found = json.loads(capsys.readouterr().out)
    assert found["request_counts"]["completed"] == 12_331
    assert found["eta_s"] == 1157.0


def test_the_view_follows_the_terminal(monkeypatch: pytest.MonkeyPatch, progress: JobProgress) -> None:
    assert type(terminal_view(every_s=5)) is LineView
    assert type(terminal_view(every_s=5, as_json=True)) is JsonView
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert type(terminal_view(every_s=5)) is LiveView


def test_the_live_view_takes_looks_and_trouble(progress: JobProgress) -> None:
    out = io.StringIO()
    with LiveView(Console(file=out, force_terminal=True, width=80)) as view:
        view.show(progress)
        view.trouble("the job store [x] failed")
    assert "the job store [x] failed" in out.getvalue()
    assert "12,345/60,000 rows" in out.getvalue()


def of(make_info: MakeInfo, number: int, tier: Tier, rate: float | None, **changes: Any) -> JobProgress:
    job = make_info(job_id=f"job-20261129-{number:08}", options=JobOptions(tier=tier), **changes)
    return JobProgress(job=job, rows_per_s=rate, tokens_per_s=None, eta_s=None, silent_s=0.0, at=0.0)


def test_jobs_are_added_up_by_tier(make_info: MakeInfo) -> None:
    jobs = [
        of(make_info, 1, Tier.LOW, 10.0, rows=RowCounts(total=100, completed=40)),
        of(make_info, 2, Tier.LOW, 5.0, rows=RowCounts(total=50)),
        of(make_info, 3, Tier.HIGH, None, num_shards_by_state={ShardState.LEASED: 2}),
    ]
    high, normal, low = by_tier(jobs)
    assert (high.tier, high.jobs, high.rows_per_s, high.shards_leased) == ("high", 1, None, 2)
    assert (normal.jobs, normal.rows_left, normal.rows_per_s) == (0, 0, None)
    assert (low.jobs, low.rows_left, low.rows_per_s, low.shards_available) == (2, 110, 15.0, 14)


def test_the_fleet_fits_80_columns(make_info: MakeInfo) -> None:
    jobs = [of(make_info, i, Tier.NORMAL, 1234.5, rows=RowCounts(total=10_000_000)) for i in range(MAX_SHOWN + 3)]
    lines = drawn(fleet_table(jobs))
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "and 3 more" in text
    assert "high" in text
    assert "…" not in text
