"""Waiting: how long, over what, and with which exit code; what is known of the speed meanwhile."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from nightmill.cli.outcome import tell_outcome
from nightmill.durations import clock, parse_duration
from nightmill.errors import ExitCode, NotFoundError, StoreError, WaitTimedOutError
from nightmill.outcome import exit_code
from nightmill.progress import STALE_S, ProgressMeter
from nightmill.records import JobInfo, JobOptions, RowCounts, TokenCounts
from nightmill.states import TERMINAL_JOB, JobStatus
from nightmill.waiting import PATIENCE_S, Look, looks

MakeInfo = Callable[..., JobInfo]


class FakeStore:
    """Answers of a store, one by one; the last one stays."""

    def __init__(self, *answers: JobInfo | Exception) -> None:
        self._answers = list(answers)

    def job(self, job_id: str) -> JobInfo:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


class FakeClock:
    """Time passes only by sleeping."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.slept.append(seconds)
        self.now += seconds

    def __call__(self) -> float:
        return self.now


def watch(*answers: JobInfo | Exception, timeout_s: float | None = None) -> tuple[Iterator[Look], FakeClock]:
    clock = FakeClock()
    store: Any = FakeStore(*answers)
    return looks(store, "job-1", timeout_s=timeout_s, sleep=clock.sleep, monotonic=clock), clock


def test_the_last_look_is_at_a_job_that_has_ended(make_info: MakeInfo) -> None:
    running, done = make_info(), make_info(status=JobStatus.COMPLETED)
    seen, _ = watch(running, running, done)
    assert [look.job for look in seen] == [running, running, done]


def test_the_first_looks_come_soon_and_none_later_than_a_second(make_info: MakeInfo) -> None:
    seen, clock = watch(*[make_info()] * 30, make_info(status=JobStatus.FAILED))
    list(seen)
    assert clock.slept[0] <= 0.1
    assert max(clock.slept) == 1.0
    assert clock.slept == sorted(clock.slept)


def test_a_timeout_ends_the_waiting_at_its_time(make_info: MakeInfo) -> None:
    seen, clock = watch(make_info(), timeout_s=7.3)
    with pytest.raises(WaitTimedOutError, match="in_progress") as error:
        list(seen)
    assert clock.now == pytest.approx(1007.3)
    assert error.value.exit_code == 124
    assert "nightmill wait job-1" in str(error.value)


def test_a_job_that_has_ended_is_seen_also_without_any_time(make_info: MakeInfo) -> None:
    seen, _ = watch(make_info(status=JobStatus.COMPLETED), timeout_s=0.0)
    assert len(list(seen)) == 1


def test_a_restart_of_the_database_is_waited_out(make_info: MakeInfo) -> None:
    down = StoreError("the job store is down")
    seen, _ = watch(make_info(), down, down, make_info(status=JobStatus.COMPLETED))
    found = list(seen)
    assert [look.trouble for look in found] == [None, "the job store is down", "the job store is down", None]
    assert found[-1].job is not None


def test_a_database_that_never_answered_is_an_error_at_once() -> None:
    seen, clock = watch(StoreError("no such host"))
    with pytest.raises(StoreError, match="no such host"):
        list(seen)
    assert clock.slept == []


def test_a_database_that_stays_away_is_given_up(make_info: MakeInfo) -> None:
    seen, clock = watch(make_info(), StoreError("gone"))
    with pytest.raises(StoreError, match="gone"):
        list(seen)
    assert PATIENCE_S < clock.now - 1000 < PATIENCE_S + 5


def test_a_job_that_is_not_there_is_not_waited_for() -> None:
    seen, _ = watch(NotFoundError("no job"))
    with pytest.raises(NotFoundError):
        list(seen)


# Exit codes


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"status": JobStatus.COMPLETED, "rows": RowCounts(total=9, completed=9)}, 0),
        ({"status": JobStatus.COMPLETED, "rows": RowCounts(total=9, completed=1, failed=8)}, 0),
        ({"status": JobStatus.COMPLETED, "rows": RowCounts(total=9, failed=9)}, 5),
        ({"status": JobStatus.FAILED, "error_code": "error_budget_exceeded"}, 5),
        ({"status": JobStatus.FAILED, "error_code": "every_shard_discarded"}, 1),
        ({"status": JobStatus.CANCELLED}, 6),
        ({"status": JobStatus.EXPIRED}, 6),
    ],
)
def test_exit_codes_of_an_ended_job(make_info: MakeInfo, changes: dict[str, Any], code: int) -> None:
    job = make_info(**changes)
    assert exit_code(job) == code
    assert tell_outcome(job) == code


@pytest.mark.parametrize(("failed", "code"), [(2, ExitCode.DONE), (3, ExitCode.ROWS_FAILED)])
def test_more_failed_rows_than_allowed_is_exit_5_also_when_the_job_completed(
    make_info: MakeInfo, capsys: pytest.CaptureFixture[str], failed: int, code: int
) -> None:
    rows = RowCounts(total=9, completed=9 - failed, failed=failed)
    job = make_info(status=JobStatus.COMPLETED, rows=rows, options=JobOptions(max_failed_rows=2))
    assert tell_outcome(job) == code
    assert ("3 of 9 rows failed" in capsys.readouterr().err) == (code != 0)


@pytest.mark.parametrize("status", sorted(set(JobStatus) - TERMINAL_JOB))
def test_a_job_that_goes_on_has_no_exit_code(make_info: MakeInfo, status: JobStatus) -> None:
    with pytest.raises(ValueError, match="has not ended"):
        exit_code(make_info(status=status))


def test_every_end_has_an_exit_code(make_info: MakeInfo) -> None:
    for status in TERMINAL_JOB:
        assert exit_code(make_info(status=status)) in (0, 1, 5, 6)


# Durations


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("1.5h", 5400), ("2d", 172800), (30, 30), ("7", 7), (timedelta(minutes=2), 120)]
)
def test_durations(text: Any, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-1s", "0", 0, "1w", "9" * 400, timedelta(0)])
def test_what_is_no_duration(text: Any) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(text)


def test_a_clock_for_people() -> None:
    assert [clock(s) for s in (None, 0, 59.6, 3661, 90061)] == ["unknown", "0:00", "1:00", "1:01:01", "1 d 1:01:01"]


# Speed


def looked(make_info: MakeInfo, at: float, done: int, tokens: int = 0, **changes: Any) -> JobInfo:
    moment = make_info().created_at + timedelta(seconds=at)
    rows = RowCounts(total=1000, completed=done)
    return make_info(rows=rows, tokens=TokenCounts(completion=tokens), last_progress_at=moment, **changes)


def test_rates_come_from_the_times_that_the_database_recorded(make_info: MakeInfo) -> None:
    meter = ProgressMeter()
    meter.look(looked(make_info, 0, 100, 1000), at=5.0)
    found = meter.look(looked(make_info, 10, 200, 4000), at=5.1)  # both looks at nearly the same moment
    assert (found.rows_per_s, found.tokens_per_s, found.eta_s) == (10.0, 300.0, 80.0)


def test_case_I069_a_rate_is_unknown_rather_than_wrong(make_info: MakeInfo) -> None:
    meter = ProgressMeter()
    assert meter.look(make_info(), at=0.0).eta_s is None  # nothing has been reported
    assert meter.look(looked(make_info, 0, 500), at=1.0).eta_s is None  # since when?
    assert meter.look(looked(make_info, 1, 510), at=2.0).eta_s is None  # one burst is no rate
    assert meter.look(looked(make_info, 10, 600), at=10.0).eta_s == pytest.approx(40.0)


def test_case_I069_no_rate_survives_silence(make_info: MakeInfo) -> None:
    meter = ProgressMeter()
    meter.look(looked(make_info, 0, 100), at=0.0)
    job = looked(make_info, 10, 200)
    assert meter.look(job, at=10.0).rows_per_s == 10.0
    quiet = meter.look(job, at=10.0 + STALE_S)
    assert (quiet.rows_per_s, quiet.eta_s, quiet.silent_s) == (None, None, STALE_S)


def test_old_points_leave_the_window(make_info: MakeInfo) -> None:
    meter = ProgressMeter()
    for at in range(0, 200, 10):
        done = 10 * at if at <= 100 else 1000 + 2 * (at - 100)
        found = meter.look(looked(make_info, at, done), at=float(at))
    assert found.rows_per_s == pytest.approx(2.0)


def test_rows_that_count_again_after_a_lost_lease_make_no_negative_rate(make_info: MakeInfo) -> None:
    meter = ProgressMeter()
    for at, done in ((0, 100), (10, 200), (20, 120), (30, 150)):
        found = meter.look(looked(make_info, at, done), at=float(at))
        assert found.rows_per_s is None or found.rows_per_s >= 0
    assert found.rows_per_s == 3.0


def test_a_job_that_has_ended_has_no_eta(make_info: MakeInfo) -> None:
    meter = ProgressMeter()
    meter.look(looked(make_info, 0, 100), at=0.0)
    assert meter.look(looked(make_info, 10, 1000, status=JobStatus.COMPLETED), at=10.0).eta_s is None
