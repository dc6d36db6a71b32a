"""Decides what the next step computes."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from nightmill.states import Tier
from nightmill_worker.engine.admission import AdmissionGate
from nightmill_worker.engine.fairness import TierShares
from nightmill_worker.engine.options import LoopOptions, Policy
from nightmill_worker.engine.preemption import Preemption, PreemptionCause
from nightmill_worker.engine.residency import Match, Residency
from nightmill_worker.engine.running_table import ORDER_BITS, Rows, RunningTable
from nightmill_worker.engine.sequence import Sequence
from nightmill_worker.engine.stats import Counters
from nightmill_worker.engine.victims import VictimChooser
from nightmill_worker.engine.waiting_queue import WaitingQueue

_TIERS = sorted(Tier, key=lambda tier: tier.rank)
_VICTIM_DIVISOR = 4
"""A step that has taken a fourth of the slots from lower tiers, or of what runs ahead of need, takes for no other."""
_MAX_PASSED = 4
"""Requests of a tier that wait for pages while later ones are tried, in one step."""
_NO_ROWS: Rows = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Schedule:
    """What a step computes: decodes, then chunks, then padding."""

    rows: Rows  # [S] rows of the running table
    counts: NDArray[np.int64]  # [S] tokens of each from num_computed on; padding: its last computed token again
    num_padding: int = 0  # how many rows at the end are padding
    outgrown: Sequence | None = None  # needs more pages than there are: it must end, and nothing runs

    @property
    def num_real(self) -> int:
        """Rows that are not padding."""
        return len(self.rows) - self.num_padding


class Scheduler:
    """One decision per step: who computes how many tokens.

    Budget (tokens of the step) goes to decodes first, then per tier, starving ones and then the most urgent first, to
    partial prefills and to admissions. There is no phase: a decode is a sequence with one token left to compute.

    A request that does not fit lets later ones of its tier pass, until as many tokens have been computed as the
    options say; then they wait for it. Lower tiers always do, and all tiers while its tier starves.
    """

    def __init__(
        self,
        options: LoopOptions,
        table: RunningTable,
        queue: WaitingQueue,
        residency: Residency,
        gate: AdmissionGate,
        victims: VictimChooser,
        preemption: Preemption,
        counters: Counters,
        shares: TierShares,
    ) -> None:
        self._options = options
        self._is_static = options.policy is Policy.STATIC
        self._max_chunk = options.max_prefill_chunk or options.max_num_batched_tokens
        self._table = table
        self._queue = queue
        self._residency = residency
        self._gate = gate
        self._counters = counters
        self._num_admitted = 0
        self._num_pages = residency.num_pages
        capacity = self._num_pages * table.page_size
        self._max_bypass = capacity if options.max_bypass_tokens is None else options.max_bypass_tokens
        self._victims = victims
        self._preemption = preemption
        self._shares = shares
        self._started: list[int] = []

    def take_started(self) -> list[int]:
        """Ids of requests admitted for the first time since the last call."""
        started, self._started = self._started, []
        return started

    def schedule(self, *, ahead: bool = False) -> Schedule:
        """Preempt and admit as needed and say what runs.

        Args:
            ahead: While the step before is in flight. Rows that end with it at the latest are left out. Nothing is
                decided that its tokens could make unnecessary or wrong: where somebody would be taken off, or a draw
                depends on a token that is not known, nothing runs (no rows); it is decided when the step has ended.
        """
        try:
            return self._schedule(ahead)
        except _WaitForStep:
            return Schedule(_NO_ROWS, _NO_ROWS)

    def _schedule(self, ahead: bool) -> Schedule:
        self._queue.take_back()
        self._queue.unpark(self._residency.take_woken())
        table, padding = self._table, _NO_ROWS
        rows = table.rows()
        if ahead:
            rows = self._may_go_on(rows)
        if self._is_static:
            padded = table.is_padding[rows]
            rows, padding = rows[~padded], rows[padded]
        is_decode = table.num_tokens[rows] - table.num_computed[rows] == 1
        draft = _Draft(rows[is_decode], rows[~is_decode], len(self._queue.ranks), ahead)
        while missing := self._grow(draft.decodes):
            draft.must_be_certain()
            victim = self._victims.for_memory(missing)
            if victim is None:
                return Schedule(_NO_ROWS, _NO_ROWS, outgrown=table.sequence(int(draft.decodes[0])))
            self._take_for_memory(draft, victim)
        if self._preemption.can_swap and len(draft.decodes) > self._residency.num_available:
            self._preempt_ahead(draft)
        draft.budget = self._options.max_num_batched_tokens - len(draft.decodes) - len(padding)
        self._gate.begin_step()
        if len(draft.partial) or len(self._queue) > self._queue.num_parked:
            self._fill(draft)
        if draft.outgrown is not None:
            draft.must_be_certain()
            return Schedule(_NO_ROWS, _NO_ROWS, outgrown=draft.outgrown)
        decodes = draft.decodes
        ones = np.ones(len(decodes), np.int64), np.ones(len(padding), np.int64)
        return Schedule(
            np.concatenate((decodes, np.array(draft.rows, np.int64), padding)),
            np.concatenate((ones[0], np.array(draft.counts, np.int64), ones[1])),
            len(padding),
        )

    def _may_go_on(self, rows: Rows) -> Rows:
        """Those that have a token to draw after the one in flight."""
        table = self._table
        going_on: Rows = rows[table.num_tokens[rows] < table.max_total[rows]]
        if (table.needs_history[going_on] & (table.num_pending[going_on] > 0)).any():
            # Skipping those would give them half the pace of the others: rather let all wait.
            raise _WaitForStep
        return going_on

    def _take_for_memory(self, draft: "_Draft", row: int) -> None:
        self._gate.on_memory_preemption()
        self._take(draft, row, PreemptionCause.MEMORY)

    def _take(self, draft: "_Draft", row: int, cause: PreemptionCause) -> None:
        sequence = self._table.sequence(row)
        draft.remove(row, sequence.request.tier.rank)
        self._preemption.take_off(sequence, cause)

    def _preempt_ahead(self, draft: "_Draft") -> None:
        """Make room for the pages that the next step is known to need, while this step still has enough.

        Only by swap: the copies then have a step's time. Where recomputing is cheaper, need is early enough.
        """
        coming = self._num_coming() if draft.is_ahead else 0
        for _ in range(max(1, self._table.num_used // _VICTIM_DIVISOR)):
            missing = self._needed_next(draft.decodes) - self._residency.num_available - coming
            if missing <= 0:
                return
            row = self._victims.for_memory(missing, is_urgent=False)
            if row is None or not self._preemption.is_swap(self._table.sequence(row)):
                return
            draft.must_be_certain()
            self._take_for_memory(draft, row)

    def _num_coming(self) -> int:
        """Pages that come free with the step in flight for certain."""
        table, rows = self._table, self._table.rows()
        ending = rows[table.num_tokens[rows] >= table.max_total[rows]]
        return self._residency.num_in_flight + self._victims.num_own_pages(ending)

    def _needed_next(self, decodes: Rows) -> int:
        """Pages that decodes start in the next step, less those that come free in this one for certain."""
        table = self._table
        is_last = table.num_tokens[decodes] + 1 >= table.max_total[decodes]
        going_on = decodes[~is_last]
        starting = table.num_computed[going_on] + 1 == table.num_pages[going_on] * table.page_size
        return int(np.count_nonzero(starting)) - self._victims.num_own_pages(decodes[is_last])

    def _grow(self, decodes: Rows) -> int:
        """Give the decodes that start a new page one, or none to anyone where some are missing: how many."""
        table = self._table
        full = decodes[table.num_computed[decodes] == table.num_pages[decodes] * table.page_size]
        missing = len(full) - self._residency.num_available
        if missing <= 0 and len(full):
            self._residency.grow(full)
        return max(0, missing)

    def _fill(self, draft: "_Draft") -> None:
        """Spend the budget that decodes leave: per tier, partial prefills, then admissions."""
        table = self._table
        by_order = draft.partial[np.argsort(table.order[draft.partial])].tolist()
        if self._is_static and len(table.rows()):
            draft.closed_rank = 0
        for rank in self._ranks_in_turn():
            for row in by_order:
                # The row of a victim is empty, or has another tier's sequence by now.
                if draft.budget > 0 and table.order[row] >> ORDER_BITS == rank and table.sequences[row] is not None:
                    self._spend(draft, row)
            self._admit_tier(draft, rank)

    def _ranks_in_turn(self) -> list[int]:
        return [tier.rank for tier in self._shares.order(_TIERS)]

    def _admit_tier(self, draft: "_Draft", rank: int) -> None:
        """Admit from a tier as long as something fits; close the tiers that must not take what its next wait for."""
        # A static group is admitted whole, even when its prompts take several steps to compute.
        num_passed = 0
        while rank < draft.closed_rank:
            sequence = self._queue.head(rank)
            if sequence is None:
                break
            if draft.budget == 0 and draft.rows and not self._is_static:
                break  # others of this tier or above are being computed: the next step is soon enough
            if not self._has_place(draft) and not self._take_from_below(draft, rank, sequence):
                break
            # What was saved may lie behind a prefix that others compute; it does not wait for them.
            may_wait = not self._is_static and not self._preemption.is_saved(sequence)
            match = self._residency.match(sequence, may_wait=may_wait)
            if match.wait_for is not None:
                if self._queue.num_parked >= self._options.max_num_seqs:
                    break
                self._queue.park(rank, match.wait_for)
                continue
            if len(match.pages) + match.num_new > self._num_pages:
                draft.outgrown = sequence  # it was taken off when it had become as long as that
                break
            available = self._residency.num_available - match.num_revived
            if self._gate.admits(sequence, match, available):
                row = self._admit(sequence, match, rank)
                self._gate.on_admit(sequence)
                if draft.budget > 0:
                    self._spend(draft, row)
            elif not self._take_from_below(draft, rank, sequence, match.num_new - available):
                num_passed += 1
                if num_passed > _MAX_PASSED or not self._may_pass(sequence):
                    draft.close(rank)
                    break
                self._queue.pass_by(rank)
        if num_passed:
            draft.close(-1 if self._shares.is_starving(_TIERS[rank]) else rank + 1)

    def _may_pass(self, sequence: Sequence) -> bool:
        """Whether others may be admitted before a sequence that waits for pages."""
        now = self._counters.computed_tokens
        if sequence.passed_since is None:
            sequence.passed_since = now
        return not self._is_static and now - sequence.passed_since < self._max_bypass

    def _has_place(self, draft: "_Draft") -> bool:
        return self._table.has_free_row and (draft.budget > 0 or self._is_static)

    def _take_from_below(self, draft: "_Draft", rank: int, taker: Sequence, num_pages: int = 0) -> bool:
        """Preempt one sequence of a lower tier for the next of this one; False when that would not help.

        A lower tier gives only while it has its share of computed tokens. Who holds more than its share of the pages
        has borrowed them, and gives before others; then the lowest.
        """
        table = self._table
        if self._is_static:
            return False
        if draft.taker is not taker and draft.num_taken >= max(1, len(table.sequences) // _VICTIM_DIVISOR):
            return False
        lowest = int(table.order[table.rows()].max(initial=0)) >> ORDER_BITS
        ranks = [r for r in range(lowest, rank, -1) if self._shares.may_preempt(_TIERS[rank], _TIERS[r])]
        ranks.sort(key=self._is_within_own_pages)
        if not ranks or self._victims.num_freeable(ranks) < num_pages:
            return False
        row = self._victims.for_tier(ranks, max(1, num_pages))
        if row is None:
            return False
        draft.must_be_certain()
        draft.num_taken += 1
        draft.taker = taker
        self._take(draft, row, PreemptionCause.TIER)
        self._gate.on_tier_preemption()
        return True

    def _is_within_own_pages(self, rank: int) -> bool:
        table = self._table
        rows = table.rows()
        held = int(table.num_pages[rows[table.order[rows] >> ORDER_BITS == rank]].sum())
        return held <= self._shares.share(_TIERS[rank]) * self._num_pages

    def _spend(self, draft: "_Draft", row: int) -> None:
        count = min(self._table.num_missing(row), draft.budget, self._max_chunk)
        draft.rows.append(row)
        draft.counts.append(count)
        draft.budget -= count

    def _admit(self, sequence: Sequence, match: Match, rank: int) -> int:
        self._queue.pop(rank)
        sequence.passed_since = None
        self._residency.unwant(sequence)
        self._num_admitted += 1
        row = self._table.bind(sequence, (rank << ORDER_BITS) + self._num_admitted)
        self._residency.attach(sequence, match)
        num_matched = int(self._table.num_computed[row])
        if sequence.num_cached is None:
            sequence.num_cached = num_matched
            self._started.append(sequence.request.request_id)
            self._counters.prompt_tokens += len(sequence.request.prompt)
            self._counters.cached_tokens += num_matched
        self._preemption.restore(sequence)
        return row


class _WaitForStep(Exception):  # noqa: N818 - not an error
    """What is to be decided depends on the step in flight."""


@dataclass(slots=True)
class _Draft:
    """A step while it is being decided."""

    decodes: Rows
    partial: Rows
    closed_rank: int  # tiers from this rank on admit nobody in this step
    is_ahead: bool  # the step before is in flight
    budget: int = 0  # tokens left
    rows: list[int] = field(default_factory=list)  # with a chunk, one of `counts` tokens
    counts: list[int] = field(default_factory=list)
    num_taken: int = 0  # victims of higher tiers
    outgrown: Sequence | None = None  # waits, and can never be admitted again
    taker: Sequence | None = None  # for whom the last of them was taken

    def must_be_certain(self) -> None:
        """Before somebody is taken off or given up: what has been decided so far stays, the rest is decided anew."""
        if self.is_ahead:
            raise _WaitForStep

    def close(self, rank: int) -> None:
        """Admit nobody of this tier or below in this step."""
        self.closed_rank = min(self.closed_rank, rank)

    def remove(self, row: int, rank: int) -> None:
        """A sequence of this tier is taken off. Nobody of its tier or below may have what it gives."""
        self.close(rank)
        num_decodes = len(self.decodes)
        self.decodes, self.partial = self.decodes[self.decodes != row], self.partial[self.partial != row]
        self.budget += num_decodes - len(self.decodes)
