"""The running sequences as arrays: one row each, so that a step is packed and committed without per-row Python."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nightmill.errors import EngineError
from nightmill_worker.engine.sequence import Sequence, SequenceState

Rows = NDArray[np.int64]

ORDER_BITS = 48
"""`order` is the tier's rank above the admission number, in these many bits."""
IMMUNE_TOKENS = 64
"""A sequence that has come back draws this many before it may be taken off again: preempting must pay."""
_INITIAL_STOP_IDS = 8


class RunningTable:
    """Arrays indexed by row. The page table's columns from `num_pages` on are the null page.

    Invariant of every row: num_computed < num_tokens, num_computed ≤ num_pages · page_size.

    A step that runs ahead (see run_ahead.py) is counted when it is submitted: `num_tokens` then includes `num_pending`
    tokens that are not known yet.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, page_size: int, *, vocab_size: int) -> None:
        rows = max_num_seqs
        self.page_size = page_size
        self._vocab_size = vocab_size
        self.sequences: list[Sequence | None] = [None] * rows
        self.tokens = np.zeros((rows, max_model_len), np.int32)  # untouched pages of it cost no memory
        self.page_table = np.zeros((rows, -(-max_model_len // page_size)), np.int32)
        self.num_pages = np.zeros(rows, np.int64)  # pages in the page table
        self.num_published = np.zeros(rows, np.int64)  # leading pages that are in the prefix index
        self.num_tokens = np.zeros(rows, np.int64)  # prompt + generated
        self.num_computed = np.zeros(
            rows, np.int64
        )  # tokens whose KV is in the pages, or will be when steps have ended
        self.num_pending = np.zeros(rows, np.int64)  # of num_tokens, those that steps in flight are drawing
        self.draw_index = np.zeros(rows, np.int32)  # where the last of them is in its step's SampleBatch
        self.last_step = np.full(rows, -1, np.int64)  # the last step submitted ahead that has the row; -1: none
        self.epoch = np.zeros(rows, np.int64)  # another one whenever the sequence leaves: what was meant for it is void
        self.max_computed = np.zeros(rows, np.int64)  # of an earlier run: what is computed below it is done again
        # After a swap: computing goes up to hole_end, from there to hole_to the KV was restored. 0: no hole.
        self.hole_end = np.zeros(rows, np.int64)
        self.hole_to = np.zeros(rows, np.int64)
        self.prompt_len = np.zeros(rows, np.int64)
        self.min_total = np.zeros(rows, np.int64)  # num_tokens from which a stop counts
        self.max_total = np.zeros(rows, np.int64)  # num_tokens at which the sequence ends
        self.order = np.zeros(rows, np.int64)  # (tier rank, admission number) in one comparable integer
        self.num_preemptions = np.zeros(rows, np.int64)
        self.immune_until = np.zeros(rows, np.int64)  # num_tokens until which it is not preempted again
        self.entry = np.zeros(rows, np.int64)  # of the ledger
        self.request_id = np.zeros(rows, np.int64)
        self.is_padding = np.zeros(rows, np.bool_)  # ended, kept in the batch by the static policy
        self.stop_ids = np.full((rows, _INITIAL_STOP_IDS), -1, np.int32)  # EOS and stop tokens, -1 fills
        self.has_stop_strings = np.zeros(rows, np.bool_)
        self.needs_history = np.zeros(rows, np.bool_)
        self.seed = np.zeros(rows, np.uint64)
        self.temperature = np.zeros(rows, np.float32)
        self.top_k = np.zeros(rows, np.int32)
        self.top_p = np.zeros(rows, np.float32)
        self.min_p = np.zeros(rows, np.float32)
        self.presence_penalty = np.zeros(rows, np.float32)
        self.frequency_penalty = np.zeros(rows, np.float32)
        self.repetition_penalty = np.zeros(rows, np.float32)
        self.num_logprobs = np.zeros(rows, np.int32)
        self._is_used = np.zeros(rows, np.bool_)
        self._free_rows = list(range(rows - 1, -1, -1))
        self._rows: Rows | None = None
        self.version = 0
        """Changes when a row changes its sequence, or a page for another one."""

    @property
    def num_used(self) -> int:
        """Rows in use, padding included."""
        return len(self.sequences) - len(self._free_rows)

    @property
    def has_free_row(self) -> bool:
        """Another sequence can be bound."""
        return bool(self._free_rows)

    def num_missing(self, row: int) -> int:
        """Tokens to compute before the row draws, or reaches what was restored."""
        return int((self.hole_end[row] or self.num_tokens[row]) - self.num_computed[row])

    def rows(self) -> Rows:
        """Rows in use, ascending; not to be written to."""
        if self._rows is None:
            self._rows = np.flatnonzero(self._is_used)
        return self._rows

    def sequence(self, row: int) -> Sequence:
        """The sequence of a row in use."""
        sequence = self.sequences[row]
        if sequence is None:
            raise EngineError(f"row {row} of the running table is not in use")
        return sequence

    def bind(self, sequence: Sequence, order: int) -> int:
        """Give a sequence a row, with nothing computed and no pages."""
        row = self._free_rows.pop()
        request, sampling = sequence.request, sequence.request.sampling
        length, num_tokens = len(request.prompt), sequence.num_tokens
        self.tokens[row, :length] = request.prompt
        self.tokens[row, length:num_tokens] = sequence.generated
        self.num_tokens[row] = num_tokens
        self.num_computed[row] = self.num_pages[row] = self.num_published[row] = 0
        self.max_computed[row] = sequence.max_computed
        self.hole_end[row] = self.hole_to[row] = 0
        self.prompt_len[row] = length
        self.min_total[row] = length + sampling.min_tokens
        self.max_total[row] = length + sampling.max_tokens
        self.order[row] = order
        self.entry[row], self.request_id[row] = sequence.entry, request.request_id
        self.num_preemptions[row] = sequence.num_preemptions
        self.immune_until[row] = num_tokens + IMMUNE_TOKENS if sequence.num_preemptions else 0
        # A tokenizer may name an EOS that this model cannot draw; banned (min_tokens), it would be another row's token.
        stop_ids = dict.fromkeys(request.eos_token_ids + sampling.stop_token_ids)
        self._set_stop_ids(row, tuple(i for i in stop_ids if 0 <= i < self._vocab_size))
        self.has_stop_strings[row] = sequence.stop is not None
        self.needs_history[row] = (
            sampling.presence_penalty != 0 or sampling.frequency_penalty != 0 or sampling.repetition_penalty != 1
        )
        self.seed[row] = request.seed
        self.temperature[row] = 0 if sampling.is_greedy else sampling.temperature
        self.top_k[row] = sampling.top_k
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.presence_penalty[row] = sampling.presence_penalty
        self.frequency_penalty[row] = sampling.frequency_penalty
        self.repetition_penalty[row] = sampling.repetition_penalty
        self.num_logprobs[row] = -1 if sampling.logprobs is None else sampling.logprobs
        self.is_padding[row] = False
        self._is_used[row] = True
        self.sequences[row] = sequence
        sequence.row, sequence.state = row, SequenceState.RUNNING
        self._rows = None
        self.version += 1
        return row

    def unbind(self, row: int) -> None:
        """Take a row back. Its pages have been given back before."""
        self.sequence(row).row = -1
        self.num_pending[row], self.last_step[row] = 0, -1
        self.epoch[row] += 1
        self.sequences[row] = None
        self._is_used[row] = False
        self._free_rows.append(row)
        self._rows = None
        self.version += 1

    def pad(self, row: int) -> None:
        """Keep an ended row in the batch."""
        self.is_padding[row] = True

    def generated(self, row: int) -> tuple[int, ...]:
        """Tokens drawn so far, as far as they are known."""
        end = self.num_tokens[row] - self.num_pending[row]
        return tuple(self.tokens[row, self.prompt_len[row] : end].tolist())

    def stop_ids_of(self, row: int) -> NDArray[np.int32]:
        """EOS and stop tokens of a row, without the filling."""
        ids: NDArray[Any] = self.stop_ids[row]
        return ids[ids >= 0]

    def _set_stop_ids(self, row: int, ids: tuple[int, ...]) -> None:
        missing = len(ids) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=-1)
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(ids)] = ids
