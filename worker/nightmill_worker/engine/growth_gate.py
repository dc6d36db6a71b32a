"""Admission by predicted growth: what runs, the candidate and the length model, as GrowthRound wants them."""

import numpy as np
from numpy.typing import NDArray

from nightmill.states import Tier
from nightmill_worker.engine.growth import FOREVER, Candidate, GrowthRound, Holders, Margin, grid, reserve_pages
from nightmill_worker.engine.length_model import LengthDistribution, LengthModel
from nightmill_worker.engine.options import LoopOptions
from nightmill_worker.engine.page_pool import PagePool
from nightmill_worker.engine.request import FinishReason
from nightmill_worker.engine.residency import Match
from nightmill_worker.engine.running_table import Rows, RunningTable
from nightmill_worker.engine.sequence import Sequence
from nightmill_worker.engine.survival_tables import SurvivalTables

_FIT_STEPS = 64
"""Running sequences get longer without anybody ending: look again after so many steps."""


class GrowthGate:
    """See AdmissionGate. Admits what the pool holds until everything has ended, as far as lengths can be foreseen.

    A prompt that takes several steps to compute delays its sequence: its pages are counted until the latest end, and
    grow from the earliest beginning.
    """

    def __init__(self, options: LoopOptions, table: RunningTable, pool: PagePool, lengths: LengthModel) -> None:
        self.margin = Margin()
        self._options = options
        self._max_chunk = min(options.max_prefill_chunk or FOREVER, options.max_num_batched_tokens)
        self._table = table
        self._pool = pool
        self._lengths = lengths
        self._grid = grid(options.max_model_len)
        self._distributions: list[LengthDistribution] = []
        self._survival = SurvivalTables(self._distributions)
        self._index: dict[tuple[str, str], int] = {}
        self._distribution_of_row = np.zeros(options.max_num_seqs, np.int64)
        self._is_known = np.zeros(options.max_num_seqs, np.bool_)
        self.predicted_peak: float | None = None
        """Most pages ever held by all that had been admitted, as of the last admission that had to be predicted for."""
        self._round: GrowthRound | None = None
        self._hint: int | None = None
        self._refcount = pool.refcount  # at the beginning of the round
        self._lender_end: dict[int, int] = {}  # by page
        self._candidate: Candidate | None = None
        self._prefill_tokens = 0  # of all prompts under way, in the order in which they are computed
        self._steps = 0
        self._highest_rank = len(Tier)  # of all ever admitted: nobody is kept a place for who has never come
        self._spare_indices: list[int] = []

    def begin_step(self) -> None:
        """See AdmissionGate."""
        self._round = None
        self.margin.on_step()
        self._steps += 1
        if self._index:
            self._fit()

    def admits(self, sequence: Sequence, match: Match, num_available: int) -> bool:
        """See AdmissionGate."""
        self._candidate = None
        if match.num_new > num_available:
            return False
        if self._table.num_used == 0:
            return True  # alone: nothing else can grow
        tier, num_pages = sequence.request.tier, self._pool.num_usable
        limit = num_pages
        if self._highest_rank < tier.rank:
            limit -= reserve_pages(tier, num_pages, self._options.tier_reserve, self._options.tier_shares)
        if self._round is None:
            if self._fits_at_worst(sequence, limit):
                return True
            self._round = self._begin_round()
        candidate = self._as_candidate(sequence, match)
        if not self._round.fits(candidate, limit):
            self._hint = self._round.worst
            return False
        self._candidate = candidate
        return True

    def on_admit(self, sequence: Sequence) -> None:
        """See AdmissionGate."""
        row = sequence.row
        self._highest_rank = min(self._highest_rank, sequence.request.tier.rank)
        self._is_known[row] = is_length_known(sequence)
        self._distribution_of_row[row] = self._distribution_index(sequence)
        if self._round is not None and self._candidate is not None:
            self._round.add(self._candidate)
            self.predicted_peak = self._round.peak
            self._prefill_tokens += int(self._table.num_tokens[row] - self._table.num_computed[row])

    def on_memory_preemption(self) -> None:
        """See AdmissionGate."""
        self.margin.on_memory_preemption()

    def on_tier_preemption(self) -> None:
        """See AdmissionGate."""
        self._round = None  # predict anew

    def on_end(self, sequence: Sequence, reason: FinishReason) -> None:
        """See AdmissionGate."""
        if reason is FinishReason.ERROR or is_length_known(sequence):
            return
        request = sequence.request
        distribution = self._lengths.distribution(request.job_id, request.tier, request.sampling.max_tokens)
        distribution.observe(len(sequence.generated), is_censored=reason is not FinishReason.STOP)

    def expected_remaining(self, rows: Rows) -> NDArray[np.int64]:
        """[N] tokens that running rows are expected to draw yet, at least 1 each."""
        table = self._table
        expected: NDArray[np.int64] = (table.max_total - table.num_tokens)[rows]
        generated = (table.num_tokens - table.prompt_len)[rows]
        unknown = ~self._is_known[rows]
        for index in np.unique(self._distribution_of_row[rows[unknown]]).tolist():
            mine = np.flatnonzero(unknown & (self._distribution_of_row[rows] == index))
            limits = generated[mine] + expected[mine]
            mean = self._distributions[index].remaining(generated[mine], limits).mean
            expected[mine] = np.ceil(mean).astype(np.int64)
        return np.maximum(expected, 1)

    def forget_job(self, job_id: str) -> None:
        """See AdmissionGate."""
        for key in [key for key in self._index if key[0] == job_id]:
            self._spare_indices.append(self._index.pop(key))
        self._lengths.forget_job(job_id)

    def _fits_at_worst(self, sequence: Sequence, limit: int) -> bool:
        """Even if every answer gets as long as it may: cheap to know, and in a large pool it is nearly always so."""
        rows = self._table.rows()
        longest = len(sequence.request.prompt) + sequence.request.sampling.max_tokens
        total = int(self._table.max_total[rows].sum()) + longest
        return total // self._pool.page_size + len(rows) + 1 <= limit  # at most a partial page each

    def _begin_round(self) -> GrowthRound:
        table, pool = self._table, self._pool
        self._refcount = pool.refcount.copy()
        self._lender_end = {}
        rows = table.rows()
        # Whose last token is being drawn is gone when the step that is decided here begins.
        rows = rows[table.num_tokens[rows] < table.max_total[rows]]
        own = table.num_tokens[rows].copy()
        num_shared = 0
        if self._options.enable_prefix_caching:
            num_shared = int(np.count_nonzero(pool.refcount > 1))
            if num_shared:
                own -= pool.page_size * self._num_shared(rows)
        limits = (table.max_total - table.prompt_len)[rows]
        earliest, latest = self._delays(rows)
        holders = Holders(
            own_tokens=np.maximum(own - earliest, 0),
            generated=(table.num_tokens - table.prompt_len)[rows],
            limits=limits + latest,
            is_known=self._is_known[rows],
            distribution=self._distribution_of_row[rows],
        )
        # A delayed sequence holds its whole prompt already: up to a page more than `own - earliest` says.
        slack = int((-(-earliest // pool.page_size)).sum())
        return GrowthRound(
            pool.page_size,
            holders,
            self._survival,
            shared_pages=num_shared + slack,
            z=self.margin.z,
            grid=self._grid,
            hint=self._hint,
        )

    def _num_shared(self, rows: Rows) -> NDArray[np.int64]:
        """[N] pages of each row that others hold too. They come first: who holds a page holds those before it."""
        table, is_shared = self._table, self._pool.refcount > 1
        num_shared = np.zeros(len(rows), np.int64)
        sharing = np.flatnonzero(is_shared[table.page_table[rows, 0]])
        if len(sharing):
            width = int(table.num_published[rows[sharing]].max())
            pages = table.page_table[:, :width].take(rows[sharing], axis=0)
            num_shared[sharing] = is_shared.view(np.uint8).take(pages).sum(axis=1, dtype=np.int64)
        return num_shared

    def _delays(self, rows: Rows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Steps until each row draws its next token, beyond the coming one: at least, at most."""
        table = self._table
        missing = (table.num_tokens - table.num_computed)[rows]
        earliest, latest = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
        partial = np.flatnonzero(missing > 1)
        partial = partial[np.argsort(table.order[rows[partial]])]
        ahead = np.cumsum(missing[partial])
        self._prefill_tokens = int(ahead[-1]) if len(ahead) else 0
        earliest[partial], latest[partial] = self._delay(ahead, missing[partial])
        return earliest, latest

    def _delay(self, ahead: NDArray[np.int64], own: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Delays where `ahead` prompt tokens, `own` among them, are to be computed first."""
        budget = self._options.max_num_batched_tokens
        slowest = max(1, budget - self._options.max_num_seqs)
        chunks = -(-own // self._max_chunk)
        return np.maximum(-(-ahead // budget), chunks) - 1, np.maximum(-(-ahead // slowest), chunks) - 1

    def _delay_of_one(self, ahead: int, own: int) -> tuple[int, int]:
        """`_delay` without arrays."""
        budget = self._options.max_num_batched_tokens
        slowest = max(1, budget - self._options.max_num_seqs)
        chunks = -(-own // self._max_chunk)
        return max(-(-ahead // budget), chunks) - 1, max(-(-ahead // slowest), chunks) - 1

    def _as_candidate(self, sequence: Sequence, match: Match) -> Candidate:
        request, size = sequence.request, self._pool.page_size
        num_held = int(np.count_nonzero(self._pool.refcount[match.pages]))  # a prefix, as holders hold what is before
        # Those that were not shared when the round summed them up, so that they are in no count but their lender's.
        num_lent = int(np.count_nonzero(self._refcount[match.pages[:num_held]] <= 1))
        missing = sequence.num_tokens - size * len(match.pages)
        delay, latest = self._delay_of_one(self._prefill_tokens + missing, missing)
        # As for those that run: it grows from `delay` on, and holds its whole prompt before.
        own = max(0, sequence.num_tokens - size * num_held - delay) + size * self._pool.num_pages(delay)
        return Candidate(
            own_tokens=own,
            generated=len(sequence.generated),
            limit=request.sampling.max_tokens + latest,
            is_known=is_length_known(sequence),
            distribution=self._distribution_index(sequence),
            lent_pages=num_lent,
            lender_ends=self._lender_ends(match, num_held) if num_lent else FOREVER,
        )

    def _lender_ends(self, match: Match, num_held: int) -> int:
        """Steps until whoever held the last held page first in this round ends, as far as it is known."""
        page = int(match.pages[num_held - 1])
        if page not in self._lender_end:
            self._lender_end[page] = self._first_holder_ends(page, num_held - 1)
        return self._lender_end[page]

    def _first_holder_ends(self, page: int, column: int) -> int:
        table = self._table
        rows = table.rows()
        lender = rows[table.page_table[rows, column] == page]
        if len(lender) == 0 or not self._is_known[lender[0]]:
            return FOREVER
        return int(table.max_total[lender[0]] - table.num_tokens[lender[0]])

    def _distribution_index(self, sequence: Sequence) -> int:
        request = sequence.request
        if is_length_known(sequence):
            return 0
        key = (request.job_id, request.tier.value)
        distribution = self._lengths.distribution(*key, request.sampling.max_tokens)
        index = self._index.get(key)
        if index is None:
            index = self._index[key] = self._spare_indices.pop() if self._spare_indices else len(self._distributions)
            self._distributions[index : index + 1] = [distribution]
        return index

    def _fit(self) -> None:
        is_due = self._steps % _FIT_STEPS == 0
        rows = None
        for index, distribution in enumerate(self._distributions):
            if is_due or distribution.needs_fit():
                if rows is None:
                    rows = self._table.rows()
                mine = rows[(self._distribution_of_row[rows] == index) & ~self._is_known[rows]]
                distribution.fit((self._table.num_tokens - self._table.prompt_len)[mine])


def is_length_known(sequence: Sequence) -> bool:
    """It ends at max_tokens and nowhere before."""
    sampling = sequence.request.sampling
    if sampling.min_tokens >= sampling.max_tokens:
        return True
    return not (sequence.request.eos_token_ids or sampling.stop_token_ids or sampling.stop)
