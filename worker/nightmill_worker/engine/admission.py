"""Whether a waiting sequence may join the batch now."""

from typing import Protocol

import numpy as np

from nightmill_worker.engine.running_table import RunningTable
from nightmill_worker.engine.sequence import Sequence


class AdmissionGate(Protocol):
    """Decides by pages; slots and the step's token budget are the scheduler's."""

    def admits(self, sequence: Sequence, num_new: int, num_available: int, table: RunningTable) -> bool:
        """Whether the sequence may run with the others.

        Args:
            sequence: The candidate.
            num_new: Pages to allocate for the tokens it has now.
            num_available: Pages that can be allocated once its prefix hit is pinned.
            table: Those that run.
        """
        ...


class WatermarkGate:
    """Admit when every running sequence, the new one too, could still take one more page.

    Growth beyond that is not foreseen: when the pool runs out, the latest is preempted.
    """

    def admits(self, sequence: Sequence, num_new: int, num_available: int, table: RunningTable) -> bool:
        """See AdmissionGate. Alone, a sequence needs no reserve: nothing else can grow."""
        if table.num_used == 0:
            return num_new <= num_available
        return num_new + table.num_used + 1 <= num_available


class ReserveGate:
    """Admit when every sequence could reach its longest form: never preempts, leaves much of the pool empty.

    The static policy's gate: a group that was started must be able to end.
    """

    def __init__(self, num_usable: int, page_size: int) -> None:
        self._num_usable = num_usable
        self._page_size = page_size

    def admits(self, sequence: Sequence, num_new: int, num_available: int, table: RunningTable) -> bool:
        """See AdmissionGate. Alone, only the tokens there are must fit."""
        rows = table.rows()
        if len(rows) == 0:
            return num_new <= num_available
        longest = len(sequence.request.prompt) + sequence.request.sampling.max_tokens
        # The last token drawn is never computed, so it needs no place.
        places = np.append(table.max_total[rows], longest) - 1
        return int((-(-places // self._page_size)).sum()) <= self._num_usable
