"""Books what steps compute: the engine's counters, each job's ledger, each tier's share."""

import numpy as np

from nightmill.states import Tier
from nightmill_worker.engine.fairness import TierShares
from nightmill_worker.engine.groups import tokens_saved
from nightmill_worker.engine.ledger import Ledger
from nightmill_worker.engine.page_pool import PagePool
from nightmill_worker.engine.roofline import Roofline, step_work
from nightmill_worker.engine.running_table import ORDER_BITS, Rows, RunningTable
from nightmill_worker.engine.scheduler import Schedule
from nightmill_worker.engine.stats import Counters
from nightmill_worker.engine.step import StepPlan
from nightmill_worker.engine.waiting_queue import WaitingQueue


class Accounting:
    """Each step is booked twice: what it takes before it is counted in the running table, what it gave afterwards.

    Args:
        shares: None under the static policy, which knows no tiers.
        bytes_per_token: Of KV.
        roofline: Of the runner; None where it was not measured.
    """

    def __init__(
        self,
        table: RunningTable,
        pool: PagePool,
        queue: WaitingQueue,
        counters: Counters,
        ledger: Ledger,
        shares: TierShares | None,
        bytes_per_token: int,
        roofline: Roofline | None = None,
    ) -> None:
        self._table = table
        self._pool = pool
        self._queue = queue
        self._counters = counters
        self._ledger = ledger
        self._shares = shares
        self._bytes_per_token = bytes_per_token
        self._roofline = roofline

    def begin(self, schedule: Schedule, plan: StepPlan, *, is_ahead: bool = False) -> Rows | None:
        """A step, before the table is advanced for it: how many tokens of each row are computed again; None: none.

        `is_ahead`: another step is in flight, and some rows have their last token from it.
        """
        counters, num_real = self._counters, schedule.num_real
        counters.peak_pages = max(counters.peak_pages, self._pool.num_active)
        if plan.groups is not None:
            counters.shared_attention_rows += len(plan.groups.sequences)
            counters.shared_attention_bytes += tokens_saved(plan.groups, self._pool.page_size) * self._bytes_per_token
        if self._roofline is not None:
            self._bound(self._roofline, plan)
        if self._shares is not None:
            self._account(self._shares, schedule, is_ahead)
        if not counters.preemptions:
            return None
        rows, counts = schedule.rows[:num_real], schedule.counts[:num_real]
        again: Rows = np.clip(self._table.max_computed[rows] - self._table.num_computed[rows], 0, counts)
        return again

    def complete(self, rows: Rows, counts: Rows, again: Rows | None, drawing: Rows, num_void: int) -> None:
        """A step has ended; before its endings.

        Args:
            rows: [S] that were computed for somebody who is still there.
            counts: [S] tokens of each.
            again: [S] see `begin`.
            drawing: Rows that drew a token.
            num_void: Tokens computed for rows that had ended.
        """
        counters = self._counters
        counters.batch_rows += len(rows)
        counters.computed_tokens += int(counts.sum())
        counters.padding_tokens += num_void
        counters.generated_tokens += len(drawing)
        if again is not None:
            counters.recomputed_tokens += int(again.sum())
        entry = self._table.entry
        self._ledger.book(entry[rows], counts, again, entry[drawing])

    def _bound(self, roofline: Roofline, plan: StepPlan) -> None:
        cost, counters = roofline.cost, self._counters
        work = step_work(plan, cost.windows, self._pool.page_size)
        counters.bytes += cost.all_bytes(work)
        counters.flops += cost.all_flops(work)
        counters.bound_s += roofline.seconds(work)

    def _account(self, shares: TierShares, schedule: Schedule, is_ahead: bool) -> None:
        """By tier: one that is below its share is not taken from."""
        table, rows, num_real = self._table, self._table.rows(), schedule.num_real
        ranks = table.order[schedule.rows[:num_real]] >> ORDER_BITS
        computed = np.bincount(ranks, weights=schedule.counts[:num_real], minlength=len(Tier))
        # One with work that was not done: it waits, or it runs and the step had no room for all of its tokens.
        missing = (
            np.where(table.hole_end[rows], table.hole_end[rows], table.num_tokens[rows]) - table.num_computed[rows]
        )
        if is_ahead:
            missing *= table.num_tokens[rows] < table.max_total[rows]
        demand = np.bincount(table.order[rows] >> ORDER_BITS, weights=missing, minlength=len(Tier))
        by_tier = {tier: int(computed[tier.rank]) for tier in Tier}
        wanting = [t for t in Tier if demand[t.rank] > computed[t.rank] or self._queue.num_ready(t.rank)]
        shares.account(by_tier, wanting)
