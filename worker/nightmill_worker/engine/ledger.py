"""What each job has had of the engine, by job and tier. All entries together are all there was, to the nanosecond."""

import time
from collections.abc import Callable, Iterable
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from nightmill.states import Tier
from nightmill_worker.engine.request import FinishReason
from nightmill_worker.engine.stats import WorkStats

Ints = NDArray[np.int64]

_OTHERS = 0
_PACE_S = 5.0
"""Over how long the pace is taken that an ETA is worked out with."""


class Column(IntEnum):
    """A count of the ledger."""

    LIVE = 0
    FINISHED = 1
    ERRORS = 2
    ABORTED = 3
    PROMPT = 4
    CACHED = 5
    COMPUTED = 6
    RECOMPUTED = 7
    GENERATED = 8
    PREEMPTIONS = 9  # of sequences that have ended
    ENGINE_NS = 10
    AHEAD = 11  # tokens of those never admitted: prompts, and answers as long as expected


class Ledger:
    """One entry for each (job, tier), by number; a row of the running table knows its entry's. O(entries) a step."""

    def __init__(self, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock_ns = clock_ns
        self._counts: Ints = np.zeros((len(Column), 8), np.int64)  # [column, entry]
        self._entries: dict[tuple[str, Tier], int] = {("", Tier.NORMAL): _OTHERS}
        self._spare: list[int] = []
        self._started_ns = self._marked_ns = clock_ns()
        self._idle_ns = 0
        self._booked: Ints = np.zeros(0, np.int64)  # computed tokens of the last step, by entry
        self._paced_at_ns = self._started_ns
        self._paced: Ints = np.zeros(8, np.int64)  # COMPUTED then
        self._pace = np.zeros(8)  # tokens per s

    @property
    def wall_ns(self) -> int:
        """From the beginning to the last mark."""
        return self._marked_ns - self._started_ns

    @property
    def idle_ns(self) -> int:
        """Of those, charged to nobody."""
        return self._idle_ns

    @property
    def num_entries(self) -> int:
        """Jobs and tiers told apart, the forgotten ones as one."""
        return len(self._entries)

    def entry(self, job_id: str, tier: Tier) -> int:
        """The number of an entry, made when there is none."""
        found = self._entries.get((job_id, tier))
        if found is None:
            found = self._spare.pop() if self._spare else len(self._entries)
            self._entries[job_id, tier] = found
            if found == self._counts.shape[1]:
                self._counts = np.pad(self._counts, ((0, 0), (0, found)))
                self._paced, self._pace = np.pad(self._paced, (0, found)), np.pad(self._pace, (0, found))
        return found

    def begin(self, entry: int, num_tokens: int) -> None:
        """A request has come that is expected to take so many tokens."""
        self._counts[Column.LIVE, entry] += 1
        self._counts[Column.AHEAD, entry] += num_tokens

    def admit(self, entry: int, num_tokens: int, num_prompt: int, num_cached: int) -> None:
        """It has been admitted for the first time; `num_tokens` as at `begin`."""
        self._counts[(Column.AHEAD, Column.PROMPT, Column.CACHED), entry] += (-num_tokens, num_prompt, num_cached)

    def end(self, entry: int, reason: FinishReason, num_tokens: int, num_preemptions: int) -> None:
        """It has ended; `num_tokens` as at `begin`, 0 once it was admitted."""
        column = Column.FINISHED
        if reason is FinishReason.ERROR:
            column = Column.ERRORS
        elif reason is FinishReason.ABORT:
            column = Column.ABORTED
        counts = self._counts[:, entry]
        counts[Column.LIVE] -= 1
        counts[column] += 1
        counts[Column.AHEAD] -= num_tokens
        counts[Column.PREEMPTIONS] += num_preemptions

    def refuse(self, entry: int) -> None:
        """A request could not be taken."""
        self._counts[Column.ERRORS, entry] += 1

    def book(self, entries: Ints, counts: Ints, again: Ints | None, drawing: Ints) -> None:
        """A step's tokens.

        Args:
            entries: [S] of its sequences.
            counts: [S] tokens computed.
            again: [S] of those, computed before; None: none.
            drawing: Entries of the sequences that drew a token, each as often.
        """
        self._booked = np.bincount(entries, weights=counts).astype(np.int64)
        self._counts[Column.COMPUTED, : len(self._booked)] += self._booked
        if again is not None:
            lost = np.bincount(entries, weights=again).astype(np.int64)
            self._counts[Column.RECOMPUTED, : len(lost)] += lost
        drawn = np.bincount(drawing)
        self._counts[Column.GENERATED, : len(drawn)] += drawn

    def charge(self) -> None:
        """The time since the last mark belongs to those booked last, by their computed tokens."""
        upto = self._booked.cumsum()
        upto *= self._mark()
        upto //= self._booked.sum()
        upto[1:] -= upto[:-1].copy()  # the shares; they sum up to all of it
        counts = self._counts[Column.ENGINE_NS]
        counts[: len(upto)] += upto
        if self._spare:  # some may have ended in the step, and be forgotten already
            counts[_OTHERS] += counts[self._spare].sum()
            counts[self._spare] = 0

    def idle(self) -> None:
        """The time since the last mark belongs to nobody."""
        self._idle_ns += self._mark()

    def forget(self, job_ids: Iterable[str]) -> None:
        """Add the entries of jobs that have nothing live to those forgotten before."""
        for key in [(job_id, tier) for job_id in job_ids for tier in Tier]:
            entry = self._entries.pop(key, None)
            if entry is not None:
                self._counts[:, _OTHERS] += self._counts[:, entry]
                self._counts[:, entry] = 0
                self._paced[entry], self._pace[entry] = 0, 0.0
                self._spare.append(entry)

    def snapshot(self, running: Ints, remaining: Ints, swapped: Ints) -> tuple[WorkStats, ...]:
        """Every entry that has ever had anything.

        Args:
            running: Entries of the running sequences, each as often.
            remaining: Tokens that each of those has still to compute.
            swapped: Entries of the swapped sequences.
        """
        self._take_pace()
        size = self._counts.shape[1]
        num_running = np.bincount(running, minlength=size).tolist()
        num_swapped = np.bincount(swapped, minlength=size).tolist()
        ahead = (self._counts[Column.AHEAD] + np.bincount(running, remaining, size).astype(np.int64)).tolist()
        pace = self._pace.tolist()
        columns = self._counts.T.tolist()
        return tuple(
            _stats(*key, columns[i], num_running[i], num_swapped[i], ahead[i], pace[i])
            for key, i in self._entries.items()
            if any(columns[i])
        )

    def _mark(self) -> int:
        now = self._clock_ns()
        elapsed, self._marked_ns = now - self._marked_ns, now
        return elapsed

    def _take_pace(self) -> None:
        elapsed_s = (self._marked_ns - self._paced_at_ns) * 1e-9
        if elapsed_s >= _PACE_S:
            self._pace = (self._counts[Column.COMPUTED] - self._paced) / elapsed_s
            self._paced, self._paced_at_ns = self._counts[Column.COMPUTED].copy(), self._marked_ns


def _stats(
    job_id: str, tier: Tier, counts: list[int], running: int, swapped: int, remaining: int, pace: float
) -> WorkStats:
    return WorkStats(
        job_id=job_id,
        tier=tier,
        waiting=counts[Column.LIVE] - running,
        running=running,
        swapped=swapped,
        finished=counts[Column.FINISHED],
        errors=counts[Column.ERRORS],
        aborted=counts[Column.ABORTED],
        prompt_tokens=counts[Column.PROMPT],
        cached_tokens=counts[Column.CACHED],
        computed_tokens=counts[Column.COMPUTED],
        recomputed_tokens=counts[Column.RECOMPUTED],
        generated_tokens=counts[Column.GENERATED],
        preemptions=counts[Column.PREEMPTIONS],
        engine_ns=counts[Column.ENGINE_NS],
        remaining_tokens=remaining,
        eta_s=remaining / pace if pace > 0 else None,
    )
