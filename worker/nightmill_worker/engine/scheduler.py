"""Decides what the next step computes."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nightmill_worker.engine.admission import AdmissionGate
from nightmill_worker.engine.options import EvictionRule, LoopOptions, Policy
from nightmill_worker.engine.residency import Match, Residency
from nightmill_worker.engine.running_table import Rows, RunningTable
from nightmill_worker.engine.sequence import Sequence
from nightmill_worker.engine.stats import Counters
from nightmill_worker.engine.waiting_queue import WaitingQueue

_ORDER_BITS = 48
_NO_ROWS: Rows = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Schedule:
    """What a step computes: decodes, then chunks, then padding."""

    rows: Rows  # [S] rows of the running table
    counts: NDArray[np.int64]  # [S] tokens of each from num_computed on; padding: its last computed token again
    num_padding: int = 0  # how many rows at the end are padding
    outgrown: Sequence | None = None  # runs alone and needs more pages than there are: it must end, and nothing runs

    @property
    def num_real(self) -> int:
        """Rows that are not padding."""
        return len(self.rows) - self.num_padding


class Scheduler:
    """One decision per step: who computes how many tokens.

    Budget (tokens of the step) goes to decodes first, then per tier, most urgent first, to partial prefills and to
    admissions. There is no phase: a decode is a sequence with one token left to compute.
    """

    def __init__(
        self,
        options: LoopOptions,
        table: RunningTable,
        queue: WaitingQueue,
        residency: Residency,
        gate: AdmissionGate,
        counters: Counters,
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
        self._wants = options.eviction is EvictionRule.FUTURE

    def schedule(self) -> Schedule:
        """Preempt and admit as needed and say what runs."""
        self._queue.unpark(self._residency.take_woken())
        table, padding = self._table, _NO_ROWS
        rows = table.rows()
        if self._is_static:
            padded = table.is_padding[rows]
            rows, padding = rows[~padded], rows[padded]
        is_decode = table.num_tokens[rows] - table.num_computed[rows] == 1
        decodes, partial = rows[is_decode], rows[~is_decode]
        closed_rank = len(self._queue.ranks)  # tiers from this rank on admit nobody in this step
        short = self._grow(decodes)
        while short:
            victim = self._victim()
            if victim is None:
                return Schedule(_NO_ROWS, _NO_ROWS, outgrown=table.sequence(int(decodes[0])))
            closed_rank = min(closed_rank, victim.request.tier.rank)
            decodes, partial = decodes[decodes != victim.row], partial[partial != victim.row]
            self._gate.on_memory_preemption()
            self.preempt(victim)
            short = self._grow(decodes)
        budget = self._options.max_num_batched_tokens - len(decodes) - len(padding)
        chunk_rows, chunk_counts = _NO_ROWS, _NO_ROWS
        self._gate.begin_step()
        if len(partial) or (table.has_free_row and len(self._queue) > self._queue.num_parked):
            chunk_rows, chunk_counts = self._chunks(partial, budget, closed_rank)
        ones = np.ones(len(decodes), np.int64)
        return Schedule(
            np.concatenate((decodes, chunk_rows, padding)),
            np.concatenate((ones, chunk_counts, np.ones(len(padding), np.int64))),
            len(padding),
        )

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence off; it is computed again later, as far as the prefix index has lost it."""
        table, row = self._table, sequence.row
        sequence.generated = table.generated(row)
        sequence.max_computed = max(sequence.max_computed, int(table.num_computed[row]))
        sequence.num_preemptions += 1
        self._residency.release(sequence)
        table.unbind(row)
        self._queue.push_preempted(sequence)
        if self._wants:
            self._residency.want(sequence)
        self._counters.preemptions += 1

    def _grow(self, decodes: Rows) -> bool:
        """Give the decodes that start a new page one; True when there are too few, and none was given."""
        table = self._table
        full = decodes[table.num_computed[decodes] == table.num_pages[decodes] * table.page_size]
        if len(full) > self._residency.num_available:
            return True
        if len(full):
            self._residency.grow(full)
        return False

    def _victim(self) -> Sequence | None:
        """The latest of the lowest tier; None when only one sequence runs."""
        table = self._table
        rows = table.rows()
        rows = rows[~table.is_padding[rows]]
        if len(rows) < 2:
            return None
        return table.sequence(int(rows[np.argmax(table.order[rows])]))

    def _chunks(self, partial: Rows, budget: int, closed_rank: int) -> tuple[Rows, NDArray[np.int64]]:
        table = self._table
        rows: list[int] = []
        counts: list[int] = []

        def take(row: int) -> int:
            count = min(int(table.num_tokens[row] - table.num_computed[row]), budget, self._max_chunk)
            rows.append(row)
            counts.append(count)
            return count

        by_order = partial[np.argsort(table.order[partial])].tolist()
        may_admit = not self._is_static or len(table.rows()) == 0
        for rank in self._queue.ranks:
            for row in by_order:
                if budget > 0 and table.order[row] >> _ORDER_BITS == rank:
                    budget -= take(row)
            # A static group is admitted whole, even when its prompts take several steps to compute.
            while may_admit and (budget > 0 or self._is_static) and rank < closed_rank and table.has_free_row:
                sequence = self._queue.head(rank)
                if sequence is None:
                    break
                match = self._residency.match(sequence, may_wait=not self._is_static)
                if match.wait_for is not None:
                    if self._queue.num_parked >= self._options.max_num_seqs:
                        break
                    self._queue.park(rank, match.wait_for)
                    continue
                available = self._residency.num_available - match.num_revived
                if not self._gate.admits(sequence, match, available):
                    may_admit = False  # strictly: nobody of a lower tier takes what it waits for
                    break
                row = self._admit(sequence, match, rank)
                self._gate.on_admit(sequence)
                if budget > 0:
                    budget -= take(row)
        return np.array(rows, np.int64), np.array(counts, np.int64)

    def _admit(self, sequence: Sequence, match: Match, rank: int) -> int:
        self._queue.pop(rank)
        self._residency.unwant(sequence)
        self._num_admitted += 1
        row = self._table.bind(sequence, (rank << _ORDER_BITS) + self._num_admitted)
        self._residency.attach(sequence, match)
        num_matched = int(self._table.num_computed[row])
        if sequence.num_cached is None:
            sequence.num_cached = num_matched
            self._counters.prompt_tokens += len(sequence.request.prompt)
            self._counters.cached_tokens += num_matched
        return row
