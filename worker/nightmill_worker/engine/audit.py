"""Checks of what must always hold (design: invariants I1–I8, I17, I18). Tests call them after every operation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nightmill.errors import EngineError
from nightmill_worker.engine.sequence import SequenceState
from nightmill_worker.engine.step import NULL_PAGE, PoolShape, PrefixGroups, StepPlan

if TYPE_CHECKING:
    from nightmill_worker.engine.loop import EngineLoop


def audit_plan(plan: StepPlan, pool: PoolShape, vocab_size: int) -> None:
    """A plan is well formed: every index in range, positions contiguous, slots where the page table says.

    Raises:
        EngineError: it is not.
    """
    counts = np.diff(plan.query_starts)
    _require(plan.query_starts[0] == 0 and plan.query_starts[-1] == plan.num_tokens, "query_starts spans the tokens")
    _require((counts >= 1).all(), "every sequence has a token")
    _require((plan.token_ids >= 0).all() and (plan.token_ids < vocab_size).all(), "token ids are in the vocabulary")
    sequence = np.repeat(np.arange(plan.num_sequences), counts)
    within = np.arange(plan.num_tokens) - plan.query_starts[sequence]
    expected = plan.context_lens[sequence] - counts[sequence] + within
    _require((plan.positions == expected).all(), "positions end at the context length, without gaps")
    _require((plan.positions >= 0).all(), "positions are not negative")
    _require((plan.page_tables >= 0).all() and (plan.page_tables < pool.num_pages).all(), "page ids are in the pool")
    used = np.arange(plan.page_tables.shape[1]) < -(-plan.context_lens[:, None] // pool.page_size)
    _require((plan.page_tables[~used] == NULL_PAGE).all(), "columns past the context are the null page")
    _require((plan.page_tables[used] != NULL_PAGE).all(), "no visible page is the null page")
    page = plan.page_tables[sequence, plan.positions // pool.page_size].astype(np.int64)
    is_null = plan.slots // pool.page_size == NULL_PAGE
    _require(
        (plan.slots == page * pool.page_size + plan.positions % pool.page_size)[~is_null].all(),
        "slots are where the page table says",
    )
    _require(len(np.unique(plan.slots[~is_null])) == int((~is_null).sum()), "no slot is written twice")
    batch = plan.sample
    _require(
        (batch.token_index == plan.query_starts[1:][batch.sequence] - 1).all(), "a draw reads its sequence's last token"
    )
    _require((batch.position == plan.context_lens[batch.sequence]).all(), "a draw is the token after the context")
    for ids in batch.banned.values():
        _require(bool(((ids >= 0) & (ids < vocab_size)).all()), "banned tokens are in the vocabulary")
    if plan.token_source is not None:
        named = np.flatnonzero(plan.token_source >= 0)
        _require(len(plan.token_source) == plan.num_tokens, "token_source is about the step's tokens")
        _require(bool(np.isin(named, plan.query_starts[1:] - 1).all()), "only a sequence's last token is not known")
        sources = plan.token_source[named]
        _require(len(np.unique(sources)) == len(sources), "a draw is one sequence's token")
    if plan.groups is not None:
        _audit_groups(plan, plan.groups, pool.page_size)


def _audit_groups(plan: StepPlan, groups: PrefixGroups, page_size: int) -> None:
    sizes = np.diff(groups.starts)
    _require(groups.starts[0] == 0 and groups.starts[-1] == len(groups.sequences), "group starts span the sequences")
    _require((sizes >= 2).all() and (groups.num_pages >= 1).all(), "a group has sequences and pages to share")
    sequences = groups.sequences
    _require((sequences >= 0).all() and (sequences < plan.num_sequences).all(), "groups are of the step's sequences")
    _require(len(np.unique(sequences)) == len(sequences), "a sequence is in one group")
    _require((np.diff(plan.query_starts)[sequences] == 1).all(), "groups are of sequences with one token")
    pages = np.repeat(groups.num_pages, sizes)
    _require((plan.context_lens[sequences] >= pages * page_size).all(), "shared pages are full")
    first = plan.page_tables[np.repeat(sequences[groups.starts[:-1]], sizes)]
    shared = np.arange(first.shape[1]) < pages[:, None]
    _require((plan.page_tables[sequences] == first)[shared].all(), "a group's first pages are the same page ids")


def audit_loop(loop: EngineLoop) -> None:
    """Pages, counts and tables of a loop between two steps are consistent.

    Raises:
        EngineError: they are not.
    """
    pool, table = loop.pool, loop.table
    rows = table.rows()
    held = np.zeros(len(pool.refcount), np.int64)
    for row in rows.tolist():
        pages = table.page_table[row, : table.num_pages[row]]
        _require(len(np.unique(pages)) == len(pages), f"row {row} holds each page once")
        held[pages] += 1
        _require((table.page_table[row, table.num_pages[row] :] == NULL_PAGE).all(), f"row {row} ends with null pages")
        _require(
            table.num_published[row] * pool.page_size <= table.num_computed[row], f"row {row}: computed, then published"
        )
    fences = loop.residency.fences
    np.add.at(held, fences.shared_pages(), 1)
    _require((held == pool.refcount).all(), "refcounts equal the page tables and fences that hold the page (I2)")
    in_flight = fences.own_pages()
    _require(len(np.unique(in_flight)) == len(in_flight) == pool.num_in_flight, "pages in flight are counted (I1)")
    _require(held[NULL_PAGE] == 0, "nobody holds the null page")
    free = pool.free_pages()
    is_free = np.zeros(len(held), np.bool_)
    is_free[free] = True
    _require(len(np.unique(free)) == len(free), "no page is free twice (I1)")
    cached = pool.published & (held == 0)
    _require(not (is_free & (pool.published | (held > 0))).any(), "no page is in two places (I1)")
    _require(not (is_free | pool.published | (held > 0))[in_flight].any(), "a page in flight is in no other place (I1)")
    _require(int(cached.sum()) == pool.num_cached, "cached pages are counted (I1)")
    total = len(free) + int((held > 0).sum()) + pool.num_cached + pool.num_in_flight
    _require(total == pool.num_usable, "every page is somewhere (I1)")
    _require(
        (table.num_computed[rows] < table.num_tokens[rows]).all(), "a running sequence has a token to compute (I7)"
    )
    _require(
        (table.num_computed[rows] <= table.num_pages[rows] * pool.page_size).all(), "pages cover what is computed (I7)"
    )
    _require(len(rows) <= loop.options.max_num_seqs, "max_num_seqs holds (I8)")
    _audit_pending(loop)
    _audit_holes(loop)
    _audit_host(loop)
    _audit_index(loop)


def _audit_pending(loop: EngineLoop) -> None:
    table, rows = loop.table, loop.table.rows()
    pending = table.num_pending[rows]
    _require((table.num_tokens[rows] <= table.max_total[rows]).all(), "nobody draws past the end")
    _require((pending >= 0).all() and (pending <= 1).all(), "between two steps one draw is pending at most")
    waiting = rows[pending > 0]
    is_in_flight = [loop.residency.fences.is_in_flight(int(step)) for step in table.last_step[waiting]]
    _require(all(is_in_flight), "a pending draw is of a step in flight")
    _require(loop.num_in_flight > 0 or not (len(waiting) or loop.pool.num_in_flight), "nothing waits for no step")


def _audit_holes(loop: EngineLoop) -> None:
    table, rows = loop.table, loop.table.rows()
    rows = rows[table.hole_end[rows] > 0]
    _require((table.num_computed[rows] < table.hole_end[rows]).all(), "a hole ends after what is computed (I7)")
    _require((table.hole_end[rows] <= table.hole_to[rows]).all(), "what was restored lies behind the hole")
    _require((table.hole_to[rows] < table.num_tokens[rows]).all(), "a restored sequence has a token to compute (I7)")
    _require((table.hole_end[rows] % table.page_size == 0).all(), "a hole ends with a page")


def _audit_host(loop: EngineLoop) -> None:
    if loop.swap is None:
        return
    saved = loop.swap.all_saved()
    pages = [page for item in saved.values() for page in item.host_pages.tolist()]
    _require(len(set(pages)) == len(pages), "no host page holds two things (I1)")
    _require(sorted(pages) == loop.swap.host.used_pages().tolist(), "host pages in use are those of the swapped (I1)")
    off_table = (SequenceState.WAITING, SequenceState.PARKED)
    _require(all(sequence.state in off_table for sequence in saved), "a swapped sequence waits")
    size = loop.pool.page_size
    _require(
        all(item.first + len(item.host_pages) == -(-item.num_computed // size) for item in saved.values()),
        "host pages end where a swapped sequence's KV ends",
    )


def _audit_index(loop: EngineLoop) -> None:
    index, pool, table = loop.index, loop.pool, loop.table
    if index is None:
        _require(not pool.published.any(), "without an index nothing is published")
        return
    nodes = index.node_of_page
    _require(set(nodes) == set(np.flatnonzero(pool.published).tolist()), "published pages are the index's")
    children: dict[int, int] = {}
    for page, node in nodes.items():
        _require(node.page == page, "node and page point at each other")
        parent = node.parent
        _require(parent is not None, "a resident node has a parent")
        if parent is not None and parent is not index.root:
            _require(parent.page != NULL_PAGE, "a page is evicted after its children (I5)")
            _require(pool.refcount[parent.page] >= pool.refcount[page], "who holds a page holds its prefix")
        if parent is not None:
            children[parent.uid] = children.get(parent.uid, 0) + 1
    for node in (*nodes.values(), index.root):
        _require(node.num_resident_children == children.get(node.uid, 0), "resident children are counted")
    for row in table.rows().tolist():
        sequence = table.sequence(row)
        for i, node in enumerate(sequence.nodes[: table.num_published[row]]):
            _require(node.page == table.page_table[row, i], "a row's published pages are the index's")
            tokens = tuple(table.tokens[row, i * pool.page_size : (i + 1) * pool.page_size].tolist())
            _require(node.tokens == tokens, "a page is found by exactly its tokens")
        if sequence.state is SequenceState.RUNNING:
            tail = table.page_table[row, table.num_published[row] : table.num_pages[row]]
            _require((pool.refcount[tail] == 1).all(), "a page being written has one owner (I3)")
            _require(not pool.published[tail].any(), "a page being written is not published (I3)")


def _require(holds: bool | np.bool_, what: str) -> None:
    if not holds:
        raise EngineError(f"invariant broken: {what}")
