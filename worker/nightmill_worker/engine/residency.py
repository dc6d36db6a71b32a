"""What a running sequence holds in the page pool, from admission to release: the only code that moves pages."""

from dataclasses import dataclass

import numpy as np

from nightmill_worker.engine.fences import Fences
from nightmill_worker.engine.page_pool import PagePool, Pages
from nightmill_worker.engine.prefix_index import Node, PrefixIndex
from nightmill_worker.engine.running_table import Rows, RunningTable
from nightmill_worker.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Match:
    """What the prefix index holds of a sequence's tokens now. Not to be kept: it may be gone after the next step."""

    pages: Pages  # resident, in order from the first token; not pinned
    num_new: int  # pages to allocate for the rest of the tokens there are
    num_revived: int  # of `pages`, those that nobody holds: pinning them takes them from what is available
    wait_for: Node | None = None  # the last page after `pages` that a running sequence is computing


class Residency:
    """Pages of the running sequences.

    Keeps this true: the first `num_published` pages of a row are the index's own pages for those tokens. When two
    rows computed the same page, the second to publish takes the first one's page and gives its own back. Hence
    who holds a page of a prefix holds all pages before it, and every cached page can be evicted.
    """

    def __init__(self, table: RunningTable, pool: PagePool, index: PrefixIndex | None) -> None:
        self._table = table
        self._pool = pool
        self._index = index
        self.fences = Fences(pool, index)
        self._woken: list[Sequence] = []
        self._within_page = np.arange(pool.page_size)

    @property
    def num_available(self) -> int:
        """Pages that can be allocated, evicting cached ones where needed."""
        return self._pool.num_free + self._pool.num_cached

    @property
    def num_in_flight(self) -> int:
        """Pages that nobody holds any more, and that are free when the steps in flight have ended."""
        return self._pool.num_in_flight

    @property
    def num_pages(self) -> int:
        """Pages of the pool, the null page left out."""
        return self._pool.num_usable

    def take_woken(self) -> list[Sequence]:
        """Sequences whose wait for a prefix has ended since the last call."""
        woken, self._woken = self._woken, []
        return woken

    def match(self, sequence: Sequence, *, may_wait: bool) -> Match:
        """Look up a sequence that is off the table.

        Args:
            sequence: Waiting or preempted.
            may_wait: Say so when a running sequence of its tier or a more urgent one is computing the next page;
                one of a lower tier is not waited for, because it may itself have to wait for this one.
        """
        num_tokens = sequence.num_tokens
        total = self._pool.num_pages(num_tokens)
        if self._index is None:
            return Match(np.empty(0, np.int32), total, 0)
        self._intern(sequence, num_tokens // self._pool.page_size)
        # The last token is always computed: its logits are what the step is for.
        usable = sequence.nodes[: (num_tokens - 1) // self._pool.page_size]
        pages: list[int] = []
        for node in usable:
            if not node.page:
                break
            pages.append(node.page)
        wait_for = None
        if may_wait:
            for node in usable[len(pages) :]:
                if node.page or node.writer is None or _rank(node.writer) > _rank(sequence):
                    break
                wait_for = node
        matched = np.array(pages, np.int32)
        revived = int(np.count_nonzero(self._pool.refcount[matched] == 0))
        return Match(matched, total - len(pages), revived, wait_for)

    def attach(self, sequence: Sequence, match: Match) -> None:
        """Give a row just bound the matched pages and new ones for the rest of its tokens."""
        row, num_matched = sequence.row, len(match.pages)
        table = self._table
        self._pool.pin(match.pages)
        table.page_table[row, :num_matched] = match.pages
        table.page_table[row, num_matched : num_matched + match.num_new] = self._allocate(match.num_new)
        table.num_pages[row] = num_matched + match.num_new
        table.num_published[row] = num_matched
        table.num_computed[row] = num_matched * self._pool.page_size
        for node in sequence.nodes[num_matched:]:
            if not node.page and node.writer is None:
                node.writer = sequence

    def want(self, sequence: Sequence) -> None:
        """Let the pages of a waiting sequence's prefix know that they will be used again."""
        if self._index is None:
            return
        self._intern(sequence, sequence.num_tokens // self._pool.page_size)
        if not sequence.num_wanted:
            self._index.want(sequence.nodes, +1)
            sequence.num_wanted = len(sequence.nodes)

    def unwant(self, sequence: Sequence) -> None:
        """A sequence waits no longer: it has been admitted, or has ended."""
        if self._index is not None and sequence.num_wanted:
            self._index.want(sequence.nodes[: sequence.num_wanted], -1)
            sequence.num_wanted = 0

    def grow(self, rows: Rows) -> None:
        """Give each row one more page; the caller has made sure that they are available."""
        self._table.page_table[rows, self._table.num_pages[rows]] = self._allocate(len(rows))
        self._table.num_pages[rows] += 1

    def publish(self, rows: Rows, num_computed: Rows) -> None:
        """Put the pages that the rows have filled in the step just completed into the prefix index.

        Generated tokens too: a later turn of a conversation, or the sequence itself after a preemption, finds them.

        Args:
            rows: [S] of the step.
            num_computed: [S] tokens that each had computed after it; the table may be a step further.
        """
        index, table, size = self._index, self._table, self._pool.page_size
        if index is None:
            return
        full = num_computed // size
        is_new = full > table.num_published[rows]
        rows = rows[is_new]
        if len(rows) == 0:
            return
        first, full = table.num_published[rows], full[is_new]
        pages = table.page_table[rows, first].tolist()
        tokens = table.tokens[rows[:, None], first[:, None] * size + self._within_page].tolist()
        for i, (row, num_full, column) in enumerate(zip(rows.tolist(), full.tolist(), first.tolist(), strict=True)):
            if num_full > column + 1:  # of a prompt
                self._publish_row(index, row, num_full)
            else:
                self._publish_page(index, row, column, pages[i], tokens[i])
        table.num_published[rows] = full

    def release(self, sequence: Sequence, *, discard: bool = False) -> None:
        """Give all pages of a running sequence back.

        Args:
            sequence: Running; its row is unbound by the caller.
            discard: Forget its pages in the index where nobody else holds them: their content is not to be trusted.
        """
        table, row = self._table, sequence.row
        num_published = int(table.num_published[row])
        self._abandon(sequence, num_published)
        if discard:
            self._forget(sequence, num_published)
        pages = table.page_table[row, : table.num_pages[row]].copy()
        if self.fences.is_in_flight(step := int(table.last_step[row])):
            self.fences.hold(step, pages, _last_resident(sequence.nodes[:num_published]))
        else:
            self._pool.unpin(pages)
            if self._index is not None and num_published and not discard:
                self._index.touch(sequence.nodes[num_published - 1])
        table.page_table[row, : len(pages)] = 0
        table.num_pages[row] = table.num_published[row] = table.num_computed[row] = 0

    def let_go(self, sequence: Sequence) -> None:
        """Drop what a sequence that will never run again refers to in the index."""
        self.unwant(sequence)
        if self._index is not None and sequence.nodes:
            self._index.release(sequence.nodes[-1])
            sequence.nodes = []

    def _publish_row(self, index: PrefixIndex, row: int, num_full: int) -> None:
        table, size = self._table, self._pool.page_size
        first = int(table.num_published[row])
        tokens = table.tokens[row, first * size : num_full * size].tolist()
        for i, page in enumerate(table.page_table[row, first:num_full].tolist()):
            self._publish_page(index, row, first + i, page, tokens[i * size : (i + 1) * size])
        table.num_published[row] = num_full

    def _publish_page(self, index: PrefixIndex, row: int, column: int, page: int, tokens: list[int]) -> None:
        nodes = self._table.sequence(row).nodes
        if column == len(nodes):
            nodes.append(index.extend(nodes[-1] if nodes else None, tuple(tokens)))
        node = nodes[column]
        if node.page:
            self._adopt(row, column, node.page)
        else:
            index.publish(node, page)
        self._wake(node)

    def _adopt(self, row: int, column: int, page: int) -> None:
        """Put the index's page in the place of the row's own, which holds the same."""
        own = self._table.page_table[row, column : column + 1].copy()
        self._pool.pin(np.array([page], np.int32))
        self._table.page_table[row, column] = page
        self._table.version += 1
        if self.fences.is_in_flight(step := int(self._table.last_step[row])):
            self.fences.hold(step, own)  # the step was given the row's own page
        else:
            self._pool.unpin(own)

    def _intern(self, sequence: Sequence, num_full: int) -> None:
        # A sequence refers to the last node of its chain only: each node keeps its parent.
        if self._index is None:
            return
        nodes, size = sequence.nodes, self._pool.page_size
        for i in range(len(nodes), num_full):
            tokens = sequence.tokens(i * size, (i + 1) * size)
            nodes.append(self._index.extend(nodes[-1] if nodes else None, tokens))

    def _abandon(self, sequence: Sequence, num_published: int) -> None:
        for node in sequence.nodes[num_published:]:
            if node.writer is sequence:
                self._wake(node)

    def _forget(self, sequence: Sequence, num_published: int) -> None:
        if self._index is None:
            return
        for node in reversed(sequence.nodes[:num_published]):
            if self._pool.refcount[node.page] > 1 or node.num_resident_children:
                break
            self._index.forget(node)

    def _wake(self, node: Node) -> None:
        node.writer = None
        if node.waiters:
            self._woken.extend(node.waiters)
            node.waiters = []

    def _allocate(self, count: int) -> Pages:
        missing = count - self._pool.num_free
        if missing > 0 and self._index is not None:
            self._index.evict(missing)
        return self._pool.allocate(count)


def _last_resident(nodes: list[Node]) -> Node | None:
    """What a discarded sequence leaves in the index are the pages that others hold: the first ones."""
    return next((node for node in reversed(nodes) if node.page), None)


def _rank(sequence: Sequence) -> int:
    return sequence.request.tier.rank
