"""How fast a job goes and when it will be done, from what the store knows of it."""

from collections import deque
from dataclasses import dataclass

from nightmill.records import JobInfo
from nightmill.states import TERMINAL_JOB

WINDOW_S = 60.0
MIN_SPAN_S = 2.0
"""Rates are taken over at least this long: what workers report comes in bursts, a heartbeat apart."""
STALE_S = 30.0
"""Without news for so long a rate says nothing about the future any more: four heartbeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProgress:
    """A moment of a job. Rates are over the last minute; None: unknown."""

    job: JobInfo
    rows_per_s: float | None
    tokens_per_s: float | None  # generated
    eta_s: float | None
    silent_s: float  # since the job's counters were last seen to move
    at: float  # monotonic clock of the look, s

    @property
    def rows_done(self) -> int:
        """Rows that have a completion or an error."""
        return num_done(self.job)


def num_done(job: JobInfo) -> int:
    """Rows that have a completion or an error."""
    return job.rows.completed + job.rows.failed + job.rows.cancelled


@dataclass(frozen=True, slots=True)
class _Point:
    at: float  # database clock, s
    rows: int
    tokens: int


class ProgressMeter:
    """Fed with looks at one job. A rate rather unknown than wrong: it needs two reports of the workers.

    Points carry the time at which the database recorded them, so neither the interval of the looks nor a clock of
    this machine goes into a rate.
    """

    def __init__(self) -> None:
        self._points: deque[_Point] = deque()
        self._moved_at: float | None = None

    def look(self, job: JobInfo, at: float) -> JobProgress:
        """Take in a look.

        Args:
            job: As the store has it now.
            at: A monotonic clock, s.
        """
        if self._moved_at is None:
            self._moved_at = at
        if job.last_progress_at is not None:
            point = _Point(job.last_progress_at.timestamp(), num_done(job), job.tokens.completion)
            if not self._points or point != self._points[-1]:
                self._add(point)
                self._moved_at = at
        silent_s = at - self._moved_at
        rows_per_s = tokens_per_s = None
        if silent_s < STALE_S and job.status not in TERMINAL_JOB:
            rows_per_s, tokens_per_s = self._rates()
        left = job.rows.total - num_done(job)
        return JobProgress(
            job=job,
            rows_per_s=rows_per_s,
            tokens_per_s=tokens_per_s,
            eta_s=left / rows_per_s if rows_per_s else None,
            silent_s=silent_s,
            at=at,
        )

    def _add(self, point: _Point) -> None:
        last = self._points[-1] if self._points else point
        if point.rows < last.rows or point.tokens < last.tokens or point.at < last.at:
            self._points.clear()  # a lease was lost and its rows count again
        self._points.append(point)
        while self._points[0].at < point.at - WINDOW_S and len(self._points) > 2:
            self._points.popleft()

    def _rates(self) -> tuple[float | None, float | None]:
        if len(self._points) < 2:
            return None, None
        first, last = self._points[0], self._points[-1]
        span = last.at - first.at
        if span < MIN_SPAN_S:
            return None, None
        return (last.rows - first.rows) / span, (last.tokens - first.tokens) / span
