"""Rates, the time left, and how they are shown."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from nightmill_worker.cli.progress import LiveReporter, PlainReporter, terminal_reporter
from nightmill_worker.report import RunProgress
from nightmill_worker.throughput import Throughput

PROGRESS = RunProgress(
    rows_total=2000,
    rows_completed=300,
    rows_failed=2,
    rows_per_s=12.34,
    tokens_per_s=456.7,
    running=64,
    waiting=100,
    eta_s=137.6,
)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_rates_are_of_the_window_not_of_the_start() -> None:
    clock = Clock()
    throughput = Throughput(window_s=10, clock=clock)
    for second in range(100):
        clock.now = second
        throughput.sample(rows=second if second < 50 else 50 + 10 * (second - 50), tokens=0)
    assert throughput.rows_per_s == pytest.approx(10)
    assert throughput.eta_s(100) == pytest.approx(10)


def test_the_time_left_is_unknown_before_anything_finished() -> None:
    clock = Clock()
    throughput = Throughput(clock=clock)
    assert throughput.eta_s(10) is None
    throughput.sample(0, 0)
    clock.now = 1
    throughput.sample(0, 100)
    assert throughput.eta_s(10) is None
    assert throughput.tokens_per_s == 100


def test_plain_lines_come_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = PlainReporter(every_s=3600)
    reporter.phase("planning")
    reporter.progress(PROGRESS)
    reporter.progress(PROGRESS)
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert lines[0] == "planning"
    assert len(lines) == 2
    for words in ("302/2,000 rows", "12.3 rows/s", "457 tokens/s", "64 running, 100 waiting", "ETA 2:18", "2 failed"):
        assert words in lines[1]


def test_an_unknown_time_is_called_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    PlainReporter().progress(replace(PROGRESS, eta_s=None))
    assert "ETA unknown" in capsys.readouterr().err


def test_the_live_bar_shows_phase_rows_and_notes() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=160)
    with LiveReporter(console) as reporter:
        reporter.phase("loading a model [of brackets]")
        reporter.note("pool: 12 pages [x]")
        reporter.progress(replace(PROGRESS, note="draining"))
    shown = screen.getvalue()
    for words in ("pool: 12 pages [x]", "302/2,000", "12.3 rows/s", "draining"):
        assert words in shown


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal_reporter(quiet=True) as reporter:
        reporter.phase("planning")
        reporter.note("a pool")
        reporter.progress(PROGRESS)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")
