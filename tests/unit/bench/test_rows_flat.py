"""bench/rows_flat.py: what it says of a run that grows, and that it runs."""

import argparse
from dataclasses import replace
from pathlib import Path

import pytest
from bench.rows_flat import STAGES, Figures, Moment, last_over_first, line, make_small, measure


def moments(cost: float, growth: float) -> list[Moment]:
    """1,001 looks at 10,000 rows; a row costs `cost` at first and `cost · growth` in the end."""
    made, at = [], 5.0
    for i in range(1001):
        made.append(Moment(at_s=at, rows=10 * i, feeder_cpu_s=at / 10, engine_cpu_s=1.0, feeder_rss=0, engine_rss=0))
        at += 10 * cost * (1 + (growth - 1) * i / 1000)
    return made


@pytest.mark.parametrize(("growth", "low", "high"), [(1.0, 0.999, 1.001), (2.0, 1.4, 1.5), (11.0, 2.3, 2.6)])
def test_growth_within_a_run_is_seen(growth: float, low: float, high: float) -> None:
    run = moments(0.001, growth)
    assert low < last_over_first(run, lambda m: m.at_s) < high
    assert low < last_over_first(run, lambda m: m.feeder_cpu_s) < high


def test_the_line_divides_by_rows() -> None:
    figures = Figures(
        rows=10_000,
        seconds={"plan": 1.0, "load": 4.0, "rows": 20.0, "close": 3.0},
        feeder_cpu_s={"plan": 1.0, "load": 100.0, "rows": 6.0, "close": 0.5},
        engine_cpu_s=9.0,
        feeder_peak_rss=3 << 20,
        engine_peak_rss=5 << 20,
        prompt_tokens=0,
        cached_tokens=0,
        completion_tokens=0,
        steps=5_000,
        output_bytes=1_230_000,
        moments=[replace(moment, engine_cpu_s=moment.at_s) for moment in moments(0.0004, 1.0)],
    )
    cells = [cell.strip() for cell in line(figures).strip("|").split("|")]
    assert cells[:6] == ["10,000", "28.0", "2.400", "2.000", "0.100", "0.300"]
    assert cells[6:12] == ["0.750", "0.400", "0.500", "3", "5", "123"]


@pytest.mark.long
@pytest.mark.demo_model
def test_a_job_is_measured(demo_model_dir: Path, tmp_path: Path) -> None:
    small = make_small(tmp_path / "small", demo_model_dir)
    figures = measure(argparse.Namespace(threads=1, limit_s=600.0), small, 300)
    assert figures is not None
    assert figures.rows == 300
    assert figures.moments[-1].rows <= 300
    assert figures.cached_tokens >= 299 * 384  # all but the first row found the system prompt
    assert 300 * 8 <= figures.completion_tokens <= 300 * 64
    assert set(figures.seconds) == set(STAGES)
    assert all(seconds > 0 for seconds in figures.seconds.values())
