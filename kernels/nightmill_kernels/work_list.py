"""A step's attention as a list of bounded pieces of work: planned on the host in numpy, done by one GPU launch a layer.

An item is a few query rows against one range of keys of one page table. Three kinds of work are that:

- a decode: 1 row; its keys are cut into chunks, one item each, so that long and short contexts give equal pieces;
- a tile of a prefill chunk: up to `wide_height // group_size` rows of one sequence, never cut along keys;
- a tile of a shared prefix: rows of many decodes whose page tables begin alike, cut into chunks like a decode.

A row of several items has that many partial results, which a second launch merges: its `first partial` is where they
begin. A row of one item writes its result itself and has -1, unless it is in a prefix group: all rows of an item are
alike. Cuts lie at multiples of a chunk from position 0 and depend on the row's own length alone, so that its result
does not depend on its batch mates.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nightmill_kernels.metadata import AttentionWork

CHUNK = 256
"""Keys of a piece of a decode: 64 KB of K and V a head at 64 x 2 bytes, many times what begins and ends an item."""

MAX_SPLITS = 32
"""A longer row has longer chunks (twice, four times, …): this bounds its partials."""

BLOCK_KEYS = 64
"""Keys an item begins at a multiple of, unless a prefix ends there: blocks of the kernel's loop divide this."""

NARROW_HEIGHT = 16
"""Rows x heads of a group in a decode item: the least a tensor core takes."""

WIDE_HEIGHT = 64
"""Rows x heads of a group in a tile: what four warps take together on Hopper."""

ITEM, ROW, MERGE = 8, 4, 4  # int32 of an entry
Ints = NDArray[np.int32]


class Prefixes(Protocol):
    """Which decodes begin with the same full pages: `PrefixGroups` with numpy arrays, int32."""

    @property
    def starts(self) -> Ints:
        """[N + 1] group n owns sequences[starts[n]:starts[n+1]]."""
        ...

    @property
    def sequences(self) -> Ints:
        """[M] indices of sequences with one token, each in one group."""
        ...

    @property
    def num_pages(self) -> Ints:
        """[N] page ids from column 0 on that are the same in the group."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkCapacity:
    """Entries that arrays of fixed addresses need, for a graph that is replayed with other lists."""

    items: int
    rows: int
    merges: int
    partials: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkList:
    """An `AttentionWork` that is still on the host; the arrays are described there. Entries past the counts of
    `header` are never read."""

    header: Ints  # [8] narrow items, wide items, merges, columns of the page tables, 0 …
    items: Ints  # [I, 8] (first row, rows, sequence of the page table, first key, end of keys, split, 0, 0)
    rows: Ints  # [R, 4] (token, position, first partial or -1, 0)
    merges: Ints  # [M, 4] (token, first partial, partials, 0); none: zeros are written
    num_partials: int

    @property
    def num_items(self) -> int:
        """Narrow and wide ones."""
        return int(self.header[0] + self.header[1])

    @property
    def has_wide(self) -> bool:
        """Whether the kernel needs its wide tiles."""
        return bool(self.header[1])

    def padded(self, capacity: WorkCapacity) -> "WorkList":
        """With arrays of exactly this capacity. ValueError: it is too small."""
        if self.num_partials > capacity.partials:
            raise ValueError(f"a work list of {self.num_partials} partials does not fit {capacity}")
        return replace(
            self,
            items=_pad(self.items, capacity.items),
            rows=_pad(self.rows, capacity.rows),
            merges=_pad(self.merges, capacity.merges),
        )


def narrow_height(group_size: int) -> int:
    """Rows of the matrix product of a narrow item: one token's heads of a KV head, padded."""
    return max(NARROW_HEIGHT, _power_of_two(group_size))


def wide_height(group_size: int) -> int:
    """Rows of the matrix product of a wide item: `wide_height // group_size` tokens."""
    return max(WIDE_HEIGHT, _power_of_two(group_size))


def row_splits(max_context: int, window: int | None = None, *, grouped: bool = True) -> int:
    """Most partials a decode of up to `max_context` tokens can have; `grouped`: it may be in a prefix group."""
    if window is not None:
        # The window's first key is anywhere in a chunk and in a block.
        keys = min(max_context, window + BLOCK_KEYS - 1)
        return min(-(-keys // CHUNK), MAX_SPLITS) + 1
    splits = -(-max_context // CHUNK)
    return min(splits + 1, 2 * MAX_SPLITS + 1) if grouped else min(splits, MAX_SPLITS)


def decode_capacity(
    num_tokens: int, max_context: int, window: int | None = None, *, grouped: bool = False
) -> WorkCapacity:
    """What any list of up to `num_tokens` decodes (and padding) with contexts up to `max_context` fits into.

    A step with prefills has more items and rows, but never more partials than its decodes have.
    """
    pieces = num_tokens * row_splits(max_context, window, grouped=grouped)
    return WorkCapacity(items=pieces, rows=num_tokens, merges=num_tokens, partials=pieces)


def plan_attention(
    query_starts: Ints,
    context_lens: Ints,
    groups: Prefixes | None,
    *,
    num_tokens: int,
    group_size: int,
    page_size: int,
    table_width: int,
    window: int | None = None,
) -> WorkList:
    """The work of one step for the layers of one window; no step of it walks over sequences in Python.

    Args:
        query_starts: int32 [S + 1], as in `AttentionMetadata`.
        context_lens: int32 [S].
        groups: shared prefixes; a windowed call ignores them, as everywhere.
        num_tokens: T of the step: tokens from query_starts[S] on get zeros.
        group_size: query heads of a KV head.
        page_size: tokens.
        table_width: columns of the page tables that the kernel will be given.
        window: tokens a token sees, itself included; None: all before it.

    Raises:
        ValueError: a group names a sequence that is not a decode, is shorter than its prefix, or is named twice.
    """
    lengths = query_starts[1:] - query_starts[:-1]
    shared = np.zeros_like(context_lens)  # keys of the prefix that a group computes
    prefix_splits = np.zeros_like(context_lens)
    kept = None
    if groups is not None and window is None:
        kept = _keep(groups, page_size)
        _check(kept, lengths, context_lens)
        shared[kept.members] = np.repeat(kept.keys, kept.sizes)
        prefix_splits[kept.members] = np.repeat(kept.splits, kept.sizes)

    decodes = np.flatnonzero(lengths == 1).astype(np.int32)
    if kept is not None and len(kept.members):
        alone = shared[decodes] == 0
        decodes = np.concatenate((kept.members, decodes[alone]))
    contexts = context_lens[decodes]
    narrow, own_splits = _decode_items(decodes, contexts, shared[decodes], window)
    splits = prefix_splits[decodes] + own_splits
    narrow[:, 5] += np.repeat(prefix_splits[decodes], own_splits)

    # Rows of one tile are alike: members of a group have partials even if they have one each.
    parted = (splits > 1) | (shared[decodes] > 0)
    partials = np.where(parted, splits, 0)
    first = np.where(parted, np.cumsum(partials) - partials, -1)
    rows = np.zeros((len(decodes), ROW), dtype=np.int32)
    rows[:, 0], rows[:, 1], rows[:, 2] = query_starts[decodes], contexts - 1, first

    wide = []
    if kept is not None and len(kept.members):
        wide.append(_prefix_items(kept, wide_height(group_size) // group_size))
    if len(decodes) < len(lengths):
        tiles, tile_rows = _prefill_items(query_starts, context_lens, group_size, window, first_row=len(rows))
        wide.append(tiles)
        rows = np.concatenate((rows, tile_rows))
    items = narrow
    if wide:
        wide_items = np.concatenate(wide)
        # The longest first: what is left at the end is short.
        wide_items = wide_items[np.argsort(wide_items[:, 3] - wide_items[:, 4], kind="stable")]
        items = np.concatenate((narrow, wide_items))

    merges = _merges(rows[: len(decodes)], splits, parted | (splits == 0), int(query_starts[-1]), num_tokens)
    header = np.array([len(narrow), len(items) - len(narrow), len(merges), table_width, 0, 0, 0, 0], dtype=np.int32)
    return WorkList(header=header, items=items, rows=rows, merges=merges, num_partials=int(partials.sum()))


def device_work(
    work: WorkList, put: Callable[[Ints], Tensor], partial_out: Tensor, partial_lse: Tensor, *, num_programs: int
) -> AttentionWork:
    """The list as the kernels take it: `put` copies an array to the device and returns it there.

    `partial_out` [P, H, D] and `partial_lse` [P, H] are fp32 scratch of at least `work.num_partials`; all layers may
    share them. `num_programs`: see `gpu.paged_attention.num_programs`.
    """
    if partial_out.shape[0] < work.num_partials or partial_lse.shape[0] < work.num_partials:
        raise ValueError(f"scratch of {partial_out.shape[0]} partials is too small for {work.num_partials}")
    return AttentionWork(
        header=put(work.header),
        items=put(work.items),
        rows=put(work.rows),
        merges=put(work.merges),
        partial_out=partial_out,
        partial_lse=partial_lse,
        has_wide=work.has_wide,
        num_programs=num_programs,
    )


@dataclass(frozen=True, slots=True)
class _Kept:
    """Groups that share something among at least two."""

    members: Ints  # group after group
    sizes: Ints
    keys: Ints  # shared by each group
    splits: Ints
    chunks: Ints


def _keep(groups: Prefixes, page_size: int) -> _Kept:
    sizes = groups.starts[1:] - groups.starts[:-1]
    worth = (sizes > 1) & (groups.num_pages > 0)
    members = groups.sequences[groups.starts[0] : groups.starts[-1]][np.repeat(worth, sizes)]
    keys = groups.num_pages[worth] * np.int32(page_size)
    chunks = _chunks(keys)
    return _Kept(members, sizes[worth], keys, -(-keys // chunks), chunks)


def _check(kept: _Kept, lengths: Ints, context_lens: Ints) -> None:
    short = context_lens[kept.members] < np.repeat(kept.keys, kept.sizes)
    if short.any() or (lengths[kept.members] != 1).any() or (np.bincount(kept.members) > 1).any():
        raise ValueError(
            "paged_attention: a prefix group's sequences must be decodes that have all of its pages, in one group each"
        )


def _chunks(keys: Ints) -> Ints:
    """Keys of a piece for rows of so many keys: the least CHUNK · 2^n that gives MAX_SPLITS pieces at most."""
    chunks = np.full_like(keys, CHUNK)
    while len(more := np.flatnonzero(keys > chunks * MAX_SPLITS)):
        chunks[more] *= 2
    return chunks


def _decode_items(sequences: Ints, contexts: Ints, begin: Ints, window: int | None) -> tuple[Ints, Ints]:
    """Narrow items of decodes, row i being sequences[i], from key `begin` or the window on; and items of each row."""
    if window is not None:
        begin = np.maximum(0, contexts - window) // BLOCK_KEYS * BLOCK_KEYS
    chunks = _chunks(contexts - begin)
    skipped = begin // chunks
    splits = np.where(contexts > begin, -(-contexts // chunks) - skipped, 0)
    row = np.repeat(np.arange(len(sequences), dtype=np.int32), splits)
    split = _within(splits)
    chunk = chunks[row]
    start = (skipped[row] + split) * chunk
    items = np.zeros((len(row), ITEM), dtype=np.int32)
    items[:, 0], items[:, 1], items[:, 2] = row, 1, sequences[row]
    items[:, 3] = np.maximum(begin[row], start)
    items[:, 4] = np.minimum(contexts[row], start + chunk)
    items[:, 5] = split
    return items, splits


def _prefix_items(kept: _Kept, tile_rows: int) -> Ints:
    """Wide items of the shared prefixes; the rows of the members come first in the list of rows."""
    tiles = -(-kept.sizes // tile_rows)
    group = np.repeat(np.arange(len(tiles), dtype=np.int32), tiles * kept.splits)
    number = _within(tiles * kept.splits)
    tile, split = number // kept.splits[group], number % kept.splits[group]
    first_member = (np.cumsum(kept.sizes) - kept.sizes).astype(np.int32)
    items = np.zeros((len(group), ITEM), dtype=np.int32)
    items[:, 0] = first_member[group] + tile * tile_rows
    items[:, 1] = np.minimum(kept.sizes[group] - tile * tile_rows, tile_rows)
    items[:, 2] = kept.members[first_member[group]]
    items[:, 3] = split * kept.chunks[group]
    items[:, 4] = np.minimum(kept.keys[group], items[:, 3] + kept.chunks[group])
    items[:, 5] = split
    return items


def _prefill_items(
    query_starts: Ints, context_lens: Ints, group_size: int, window: int | None, *, first_row: int
) -> tuple[Ints, Ints]:
    """Wide items of the sequences with more than one token, and their rows, which follow `first_row` others."""
    lengths = query_starts[1:] - query_starts[:-1]
    sequences = np.flatnonzero(lengths > 1).astype(np.int32)
    lengths, before = lengths[sequences], (context_lens - lengths)[sequences]
    offset = _within(lengths)
    rows = np.zeros((len(offset), ROW), dtype=np.int32)
    rows[:, 0] = np.repeat(query_starts[sequences], lengths) + offset
    rows[:, 1] = np.repeat(before, lengths) + offset
    rows[:, 2] = -1

    tile_rows = wide_height(group_size) // group_size
    tiles = -(-lengths // tile_rows)
    index = np.repeat(np.arange(len(sequences), dtype=np.int32), tiles)
    offset = _within(tiles) * tile_rows
    items = np.zeros((len(index), ITEM), dtype=np.int32)
    items[:, 0] = first_row + (np.cumsum(lengths) - lengths)[index] + offset
    items[:, 1] = np.minimum(lengths[index] - offset, tile_rows)
    items[:, 2] = sequences[index]
    if window is not None:
        items[:, 3] = np.maximum(0, before[index] + offset - window + 1) // BLOCK_KEYS * BLOCK_KEYS
    # Rows before position 0 see nothing.
    items[:, 4] = np.maximum(0, before[index] + offset + items[:, 1])
    return items, rows


def _merges(rows: Ints, splits: Ints, wanted: NDArray[np.bool_], end: int, num_tokens: int) -> Ints:
    """Entries of the decodes that are `wanted`, which have partials or nothing, and of the tokens from `end` on."""
    open_rows = np.flatnonzero(wanted)
    merges = np.zeros((len(open_rows) + num_tokens - end, MERGE), dtype=np.int32)
    decodes = merges[: len(open_rows)]
    decodes[:, 0], decodes[:, 1], decodes[:, 2] = rows[open_rows, 0], rows[open_rows, 2], splits[open_rows]
    merges[len(open_rows) :, 0] = np.arange(end, num_tokens)
    return merges


def _within(counts: Ints) -> Ints:
    """0 … counts[0]-1, 0 … counts[1]-1, …"""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int32) - np.repeat((ends - counts).astype(np.int32), counts)


def _pad(entries: Ints, count: int) -> Ints:
    if len(entries) > count:
        raise ValueError(f"{len(entries)} entries of a work list do not fit its capacity of {count}")
    # Entries past the counts of the header are never read: what they hold does not matter.
    padded = np.empty((count, entries.shape[1]), dtype=np.int32)
    padded[: len(entries)] = entries
    return padded


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
