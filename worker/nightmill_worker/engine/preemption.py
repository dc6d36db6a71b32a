"""Taking a running sequence off, by swap or by recompute, so that it loses nothing."""

from enum import StrEnum

from nightmill_worker.engine.options import PreemptionMode
from nightmill_worker.engine.residency import Residency
from nightmill_worker.engine.running_table import RunningTable
from nightmill_worker.engine.sequence import Sequence
from nightmill_worker.engine.stats import Counters
from nightmill_worker.engine.swap import Swap
from nightmill_worker.engine.waiting_queue import WaitingQueue

_RATE_WEIGHT = 0.1


class PreemptionCause(StrEnum):
    """Why a sequence is taken off."""

    MEMORY = "memory"
    """The page pool has run out, or is about to."""
    TIER = "tier"
    """A more urgent one wants its slot or pages."""
    DRILL = "drill"
    """A test asks for it."""


class PreemptionCost:
    """Swap or recompute: the measured rate of copies against the measured rate of prefill.

    Both are linear in the pages concerned (attention over a long context makes recomputing dearer still), so the
    rates decide. Until a prefill has been seen, swap.
    """

    def __init__(self, bytes_per_token: int, bytes_per_s: float) -> None:
        self._swap_s_per_token = 2.0 * bytes_per_token / bytes_per_s  # out and in
        self._recompute_s_per_token: float | None = None

    def observe(self, num_tokens: int, num_sequences: int, seconds: float) -> None:
        """Take note of a step. One that mostly decodes says little about prefill, and is left out."""
        if num_tokens < 4 * num_sequences:
            return
        rate = seconds / num_tokens
        known = self._recompute_s_per_token
        self._recompute_s_per_token = rate if known is None else known + _RATE_WEIGHT * (rate - known)

    def prefers_swap(self, num_places: int, num_tokens: int) -> bool:
        """Whether copying so many tokens' places out and in takes less time than computing so many tokens."""
        if self._recompute_s_per_token is None:
            return True
        return num_places * self._swap_s_per_token < num_tokens * self._recompute_s_per_token


class Preemption:
    """Moves a sequence from the running table back to its queue.

    Args:
        mode: How; AUTO compares `cost`.
        swap: None: this runner does not swap.
        is_wanting: Waiting sequences are counted by the pages that they want.
    """

    def __init__(
        self,
        mode: PreemptionMode,
        table: RunningTable,
        queue: WaitingQueue,
        residency: Residency,
        swap: Swap | None,
        cost: PreemptionCost,
        counters: Counters,
        *,
        is_wanting: bool,
    ) -> None:
        self._mode = mode
        self._table = table
        self._queue = queue
        self._residency = residency
        self._swap = swap
        self._cost = cost
        self._counters = counters
        self._is_wanting = is_wanting

    def take_off(self, sequence: Sequence, cause: PreemptionCause, mode: PreemptionMode | None = None) -> None:
        """Preempt a running sequence; `mode` overrides the engine's. A swap without room becomes a recompute."""
        table, row, counters = self._table, sequence.row, self._counters
        sequence.generated = table.generated(row)
        sequence.max_computed = max(sequence.max_computed, int(table.num_computed[row]))
        sequence.num_preemptions += 1
        counters.preemptions += 1
        counters.preemptions_memory += cause is PreemptionCause.MEMORY
        counters.preemptions_tier += cause is PreemptionCause.TIER
        if self._swap is not None and self.is_swap(sequence, mode):
            is_saved = self._swap.save(sequence)
            counters.preemptions_swap += is_saved
            counters.preemptions_memory_swap += is_saved and cause is PreemptionCause.MEMORY
            counters.preemptions_tier_swap += is_saved and cause is PreemptionCause.TIER
        self._residency.release(sequence)
        table.unbind(row)
        self._queue.push_preempted(sequence)
        if self._is_wanting:
            self._residency.want(sequence)

    @property
    def can_swap(self) -> bool:
        """This engine may swap."""
        return self._swap is not None and self._mode is not PreemptionMode.RECOMPUTE

    def is_swap(self, sequence: Sequence, mode: PreemptionMode | None = None) -> bool:
        """How this running sequence would be taken off."""
        if self._swap is None:
            return False
        match mode or self._mode:
            case PreemptionMode.SWAP:
                return True
            case PreemptionMode.RECOMPUTE:
                return False
            case PreemptionMode.AUTO:
                own, size = self._swap.own_pages(sequence.row), self._table.page_size
                return self._cost.prefers_swap(own.num_pages * size, own.num_computed - own.first * size)

    def is_saved(self, sequence: Sequence) -> bool:
        """The host holds KV of a sequence that is off the table."""
        return self._swap is not None and self._swap.saved(sequence) is not None

    def restore(self, sequence: Sequence) -> None:
        """A sequence has its row and pages again: bring back what was saved of it."""
        if self._swap is not None:
            self._swap.restore(sequence)
