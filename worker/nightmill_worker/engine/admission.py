"""Whether a waiting sequence may join the batch now."""

from typing import Protocol

import numpy as np

from nightmill_worker.engine.request import FinishReason
from nightmill_worker.engine.residency import Match
from nightmill_worker.engine.running_table import RunningTable
from nightmill_worker.engine.sequence import Sequence


class AdmissionGate(Protocol):
    """Decides by pages; slots and the step's token budget are the scheduler's."""

    def begin_step(self) -> None:
        """A step is decided from here on; its decodes have their pages already."""
        ...

    def admits(self, sequence: Sequence, match: Match, num_available: int) -> bool:
        """Whether the sequence may run with the others.

        Args:
            sequence: The candidate.
            match: What the prefix index holds of it, and how many pages it needs besides.
            num_available: Pages that can be allocated once its prefix hit is pinned.
        """
        ...

    def on_admit(self, sequence: Sequence) -> None:
        """The sequence that `admits` has just let in has its row and pages."""
        ...

    def on_memory_preemption(self) -> None:
        """A sequence is taken off because the pool has run out."""
        ...

    def on_tier_preemption(self) -> None:
        """A sequence has been taken off in the midst of the admissions of a step, to make room."""
        ...

    def on_end(self, sequence: Sequence, reason: FinishReason) -> None:
        """A sequence has ended; `generated` is its answer."""
        ...

    def forget_job(self, job_id: str) -> None:
        """Drop what was learnt of a job; it must have nothing live."""
        ...


class _StatelessGate:
    """A gate that looks at the present only."""

    def begin_step(self) -> None:
        """See AdmissionGate."""

    def on_admit(self, sequence: Sequence) -> None:
        """See AdmissionGate."""

    def on_memory_preemption(self) -> None:
        """See AdmissionGate."""

    def on_tier_preemption(self) -> None:
        """See AdmissionGate."""

    def on_end(self, sequence: Sequence, reason: FinishReason) -> None:
        """See AdmissionGate."""

    def forget_job(self, job_id: str) -> None:
        """See AdmissionGate."""


class WatermarkGate(_StatelessGate):
    """Admit when every running sequence, the new one too, could still take one more page.

    Growth beyond that is not foreseen: when the pool runs out, the latest is preempted.
    """

    def __init__(self, table: RunningTable) -> None:
        self._table = table

    def admits(self, sequence: Sequence, match: Match, num_available: int) -> bool:
        """See AdmissionGate. Alone, a sequence needs no reserve: nothing else can grow."""
        if self._table.num_used == 0:
            return match.num_new <= num_available
        return match.num_new + self._table.num_used + 1 <= num_available


class ReserveGate(_StatelessGate):
    """Admit when every sequence could reach its longest form: never preempts, leaves much of the pool empty.

    The static policy's gate: a group that was started must be able to end.
    """

    def __init__(self, table: RunningTable, num_usable: int) -> None:
        self._table = table
        self._num_usable = num_usable
        self._page_size = table.page_size

    def admits(self, sequence: Sequence, match: Match, num_available: int) -> bool:
        """See AdmissionGate. Alone, only the tokens there are must fit."""
        if match.num_new > num_available:
            return False  # alone, or while pages of the ended are still in flight
        rows = self._table.rows()
        if len(rows) == 0:
            return True
        longest = len(sequence.request.prompt) + sequence.request.sampling.max_tokens
        # The last token drawn is never computed, so it needs no place.
        places = np.append(self._table.max_total[rows], longest) - 1
        return int((-(-places // self._page_size)).sum()) <= self._num_usable
