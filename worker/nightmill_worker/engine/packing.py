"""Turns a schedule into the flat arrays of a StepPlan, without per-row Python."""

import numpy as np
from numpy.typing import NDArray

from nightmill_worker.engine.groups import GroupFinder
from nightmill_worker.engine.running_table import Rows, RunningTable
from nightmill_worker.engine.scheduler import Schedule
from nightmill_worker.engine.step import SampleBatch, StepPlan


class Packer:
    """Reads the running table; keeps nothing but what a step has in common with the one before."""

    def __init__(self, table: RunningTable, max_num_batched_tokens: int, groups: GroupFinder | None = None) -> None:
        """`groups`: None where attention over common pages is not shared."""
        self._table = table
        self._groups = groups
        self._iota = np.arange(max(max_num_batched_tokens, table.page_table.shape[1]), dtype=np.int64)

    def pack(self, schedule: Schedule, step: int, *, is_ahead: bool = False) -> StepPlan:
        """Build a step's plan; `is_ahead`: the step before is in flight, and the tokens it draws are not known.

        A sequence draws a token when the step computes the last of its tokens; so a chunk that is not its prompt's
        last draws none, and padding, which repeats a token that is not the last, never does.
        """
        table, rows, counts = self._table, schedule.rows, schedule.counts
        starts = table.num_computed[rows]
        if schedule.num_padding:
            starts[-schedule.num_padding :] -= 1
        ends = starts + counts
        query_starts = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=query_starts[1:])
        num_tokens = int(query_starts[-1])
        flat_rows = np.repeat(rows, counts)
        positions = np.repeat(starts - query_starts[:-1], counts)
        positions += self._iota[:num_tokens]
        page, offset = np.divmod(positions, table.page_size)
        slots = table.page_table[flat_rows, page].astype(np.int64)
        slots *= table.page_size
        slots += offset
        if schedule.num_padding:
            slots[-schedule.num_padding :] = 0  # its page may be shared by now: write to the null page
        context_lens = ends.astype(np.int32)
        page_tables = self._page_tables(rows, ends)
        groups = None
        if self._groups is not None:
            groups = self._groups.find(rows, table.version, page_tables, context_lens, counts)
        drawing = np.flatnonzero(ends == table.num_tokens[rows])
        token_ids = table.tokens[flat_rows, positions]
        return StepPlan(
            step=step,
            token_ids=token_ids,
            positions=positions.astype(np.int32),
            slots=slots,
            query_starts=query_starts,
            context_lens=context_lens,
            page_tables=page_tables,
            sample=self._sample(rows[drawing], drawing, query_starts),
            groups=groups,
            token_source=self._name_sources(rows, query_starts, token_ids) if is_ahead else None,
        )

    def _name_sources(
        self, rows: Rows, query_starts: NDArray[np.int32], token_ids: NDArray[np.int32]
    ) -> NDArray[np.int32] | None:
        """[T] StepPlan.token_source; what stands for an unknown token in `token_ids` becomes 0."""
        table = self._table
        unknown = np.flatnonzero(table.num_pending[rows])
        if not len(unknown):
            return None
        # A row that has drawn has one token to compute: that one.
        tokens = query_starts[unknown]
        source = np.full(len(token_ids), -1, np.int32)
        source[tokens] = table.draw_index[rows[unknown]]
        token_ids[tokens] = 0
        return source

    def _page_tables(self, rows: Rows, ends: NDArray[np.int64]) -> NDArray[np.int32]:
        num_pages = -(-ends // self._table.page_size)
        width = int(num_pages.max(initial=0))
        tables: NDArray[np.int32] = self._table.page_table[:, :width].take(rows, axis=0)
        ahead = np.flatnonzero(self._table.num_pages[rows] > num_pages)
        if len(ahead):  # partial prefills have pages that no token of this step may see
            tables[ahead] *= self._iota[:width] < num_pages[ahead, None]
        return tables

    def _sample(self, rows: Rows, drawing: Rows, query_starts: NDArray[np.int32]) -> SampleBatch:
        table = self._table
        temperature = table.temperature[rows]
        position = table.num_tokens[rows]
        return SampleBatch(
            sequence=drawing.astype(np.int32),
            token_index=query_starts[1:][drawing] - 1,
            position=position,
            seed=table.seed[rows],
            temperature=temperature,
            top_k=table.top_k[rows],
            top_p=table.top_p[rows],
            min_p=table.min_p[rows],
            presence_penalty=table.presence_penalty[rows],
            frequency_penalty=table.frequency_penalty[rows],
            repetition_penalty=table.repetition_penalty[rows],
            num_logprobs=table.num_logprobs[rows],
            any_random=bool(temperature.any()),
            history={
                i: (table.tokens[rows[i], : position[i]], int(table.prompt_len[rows[i]]))
                for i in np.flatnonzero(table.needs_history[rows]).tolist()
            },
            banned={
                i: table.stop_ids_of(int(rows[i])) for i in np.flatnonzero(position < table.min_total[rows]).tolist()
            },
        )
