"""Which rows of a batch have their first pages in common: attention over those is computed once for all of them.

By page ids, not by reference counts: a page that two sequences hold is one id in both tables, and nothing else says
that a third one's page is the same. Rows are sorted by a few columns of their page tables, so that those with a common
prefix stand side by side; what neighbours have in common then tells every group. A wrong order could only lose one.

One level: a row is in one group. Where rows share a long prefix within a short one (a system prompt, then examples of
different tasks), the cut that saves most is taken, for each short prefix apart.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nightmill_worker.engine.step import PrefixGroups

MIN_ROWS = 4
"""Fewer rows do not repay going over the batch twice."""
MIN_TOKENS = 128
"""Nor does a shorter prefix: the kernels share it in blocks of 64 tokens."""
STATE_TOKENS = 16
"""What a row costs by being in a group, in tokens of KV not read: its partial sums are written and read."""

_FAR = np.iinfo(np.int64).max
_MAX_PAGES = 1 << 40


class GroupFinder:
    """find_groups for successive steps: while the same rows decode, it looks again only when the answer may differ.

    A row's table then changes at its end only, where a page of its own is added. That concerns no common prefix, but it
    may concern the order in which rows are compared, and whether a row is long enough.
    """

    def __init__(self, page_size: int, refcount: NDArray[np.int32]) -> None:
        """`refcount`: of the page pool, by page id; read at each call."""
        self._page_size = page_size
        self._refcount = refcount
        self._rows: NDArray[np.int64] = np.empty(0, np.int64)
        self._version = -1
        self._num_steps_left = 0
        self._groups: PrefixGroups | None = None
        fewest = -(-MIN_TOKENS // page_size)
        starts = [(cut - 1) * page_size + 1 for cut in _cuts(fewest, _MAX_PAGES)]
        self._events = np.array(sorted({fewest * page_size, *starts}))  # context lengths at which something may change

    def find(
        self,
        rows: NDArray[np.int64],
        version: int,
        page_tables: NDArray[np.int32],
        context_lens: NDArray[np.int32],
        counts: NDArray[np.int64],
    ) -> PrefixGroups | None:
        """Groups of a step; see find_groups.

        Args:
            rows: [S] of the running table.
            version: Of the running table: the same number, the same sequence in every row and the same shared pages.
            page_tables: [S, P].
            context_lens: [S].
            counts: [S].
        """
        self._num_steps_left -= 1
        is_decode = bool((counts == 1).all())
        if is_decode and self._num_steps_left > 0 and version == self._version and np.array_equal(rows, self._rows):
            return self._groups
        self._groups = find_groups(page_tables, context_lens, counts, self._page_size, self._refcount)
        self._rows, self._version, self._num_steps_left = rows, version, 0
        if is_decode and len(rows):
            self._num_steps_left = int(
                (self._events[np.searchsorted(self._events, context_lens, side="right")] - context_lens).min()
            )
        return self._groups


def find_groups(
    page_tables: NDArray[np.int32],
    context_lens: NDArray[np.int32],
    counts: NDArray[np.int64],
    page_size: int,
    refcount: NDArray[np.int32] | None = None,
) -> PrefixGroups | None:
    """Groups among the sequences with one token in this step; None when there are none.

    Args:
        page_tables: [S, P], null pages past each context.
        context_lens: [S].
        counts: [S] tokens of this step.
        page_size: Tokens.
        refcount: By page id, how many tables hold it: spares a look at those that too few do.
    """
    fewest = -(-MIN_TOKENS // page_size)
    rows = np.flatnonzero((counts == 1) & (context_lens >= fewest * page_size))
    if refcount is not None and len(rows):
        rows = rows[refcount[page_tables[rows, fewest - 1]] >= MIN_ROWS]
    if len(rows) < MIN_ROWS or not _may_share(page_tables[rows, fewest - 1]):
        return None
    cuts = _cuts(fewest, page_tables.shape[1])
    rows = rows[np.lexsort([page_tables[rows, cut - 1] for cut in reversed(cuts)])]
    common = _common_pages(page_tables[rows], context_lens[rows] // page_size)
    starts, sizes, pages = _best_runs(common, cuts, page_size)
    if len(starts) == 0:
        return None
    ends = np.cumsum(sizes)
    within = np.arange(ends[-1]) + np.repeat(starts - (ends - sizes), sizes)
    return PrefixGroups(
        starts=np.concatenate(([0], ends)).astype(np.int32),
        sequences=rows[within].astype(np.int32),
        num_pages=pages.astype(np.int32),
    )


def tokens_saved(groups: PrefixGroups, page_size: int) -> int:
    """Tokens of KV that attention need not read again in each layer without a window."""
    return int(((np.diff(groups.starts) - 1) * groups.num_pages.astype(np.int64)).sum()) * page_size


def _may_share(ids: NDArray[np.int32]) -> bool:
    """Some page is in enough rows: the cheap test that most batches without a common prefix end at."""
    ids = np.sort(ids)
    return bool((ids[MIN_ROWS - 1 :] == ids[: len(ids) - MIN_ROWS + 1]).any())


def _cuts(fewest: int, width: int) -> list[int]:
    """Page counts at which rows are told apart: `fewest`, twice that, and so on."""
    cuts = [fewest]
    while 2 * cuts[-1] <= width:
        cuts.append(2 * cuts[-1])
    return cuts


def _common_pages(tables: NDArray[np.int32], full_pages: NDArray[np.int32]) -> NDArray[np.int64]:
    """[n] leading full pages that each row has in common with the row before; 0 for the first."""
    differs = tables[1:] != tables[:-1]
    first = np.where(differs.any(axis=1), differs.argmax(axis=1), tables.shape[1])
    common = np.zeros(len(tables), np.int64)
    common[1:] = np.minimum(first, np.minimum(full_pages[1:], full_pages[:-1]))
    return common


def _best_runs(common: NDArray[np.int64], cuts: list[int], page_size: int) -> tuple[NDArray[np.int64], ...]:
    """(starts, sizes, pages) of the runs of neighbours to group, ascending."""
    runs = []
    for cut in cuts:
        is_start = common < cut
        starts = np.flatnonzero(is_start)
        sizes = np.empty_like(starts)
        np.subtract(starts[1:], starts[:-1], out=sizes[:-1])
        sizes[-1] = len(common) - starts[-1]
        pages = np.minimum.reduceat(np.where(is_start, _FAR, common), starts)
        kept = np.flatnonzero(sizes >= MIN_ROWS)
        if len(kept) == 0:
            break
        starts, sizes, pages = starts[kept], sizes[kept], pages[kept]
        runs.append((starts, sizes, pages, (sizes - 1) * pages * page_size - sizes * STATE_TOKENS))
    if not runs:
        return (np.empty(0, np.int64),) * 3
    if len(runs) == 1:
        starts, sizes, pages, gain = runs[0]
        pays = gain > 0
        return starts[pays], sizes[pays], pages[pays]
    return _best_of_levels(runs, np.cumsum(common < cuts[0]) - 1)


def _best_of_levels(
    runs: Sequence[tuple[NDArray[np.int64], ...]], root: NDArray[np.int64]
) -> tuple[NDArray[np.int64], ...]:
    """Of runs within runs, those of the level that saves most; `root`, of each row: the outermost run that it is in."""
    num_roots = int(root[-1]) + 1
    worth = np.zeros((len(runs), num_roots))
    for level, (starts, _, _, gain) in enumerate(runs):
        worth[level] = np.bincount(root[starts], gain, num_roots)
    best = worth.argmax(axis=0)
    chosen = [
        np.stack((starts, sizes, pages))[:, (best[root[starts]] == level) & (gain > 0)]
        for level, (starts, sizes, pages, gain) in enumerate(runs)
    ]
    starts, sizes, pages = np.concatenate(chosen, axis=1)
    order = np.argsort(starts)
    return starts[order], sizes[order], pages[order]
