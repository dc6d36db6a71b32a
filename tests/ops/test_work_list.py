"""The planner of the GPU's attention: what is visible is covered once, partials are nobody else's, bounds hold."""

import dataclasses
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nightmill_kernels import work_list
from nightmill_kernels.work_list import (
    BLOCK_KEYS,
    CHUNK,
    MAX_SPLITS,
    WorkList,
    decode_capacity,
    plan_attention,
    row_splits,
    wide_height,
)

PAGE_SIZE = 16


@dataclasses.dataclass(frozen=True)
class Groups:
    starts: NDArray[np.int32]
    sequences: NDArray[np.int32]
    num_pages: NDArray[np.int32]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """Lengths and contexts of sequences; members and shared pages of groups."""

    lengths: list[int]
    contexts: list[int]
    sharing: list[tuple[list[int], int]] = dataclasses.field(default_factory=list)
    unowned: int = 0
    group_size: int = 2
    window: int | None = None

    @property
    def starts(self) -> list[int]:
        return [0, *np.cumsum(self.lengths, dtype=int).tolist()]

    @property
    def num_tokens(self) -> int:
        return self.starts[-1] + self.unowned

    def plan(self) -> WorkList:
        groups = Groups(
            starts=ints([0, *np.cumsum([len(ids) for ids, _ in self.sharing], dtype=int)]),
            sequences=ints([s for ids, _ in self.sharing for s in ids]),
            num_pages=ints([count for _, count in self.sharing]),
        )
        return plan_attention(
            ints(self.starts),
            ints(self.contexts),
            groups,
            num_tokens=self.num_tokens,
            group_size=self.group_size,
            page_size=PAGE_SIZE,
            table_width=99,
            window=self.window,
        )


def ints(values: list[int]) -> NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


@st.composite
def steps(draw) -> Step:
    count = draw(st.integers(0, 9))
    window = draw(st.sampled_from([None, None, 1, 70, 300]))
    sharing, left = [], draw(st.permutations(range(count)))
    while left and draw(st.booleans()):
        size = draw(st.integers(1, len(left)))
        sharing.append((left[:size], draw(st.integers(0, 40))))
        left = left[size:]
    least = {s: pages * PAGE_SIZE for ids, pages in sharing for s in ids}
    return Step(
        lengths=[1 if s in least else draw(st.integers(0, 90)) for s in range(count)],
        contexts=[least.get(s, 0) + draw(st.integers(0, 600)) for s in range(count)],
        sharing=sharing,
        unowned=draw(st.integers(0, 3)),
        group_size=draw(st.sampled_from([1, 2, 3, 7, 8, 40])),
        window=window,
    )


def table_rows(step: Step) -> dict[int, set[int]]:
    """Sequences whose page table may stand in for a sequence's, by sequence; for the shared pages only."""
    same = {s: {s} for s in range(len(step.lengths))}
    for ids, _ in step.sharing:
        for s in ids:
            same[s] |= set(ids)
    return same


def coverage(step: Step, plan: WorkList) -> dict[int, NDArray[np.int64]]:
    """How often each token's row meets each key, by token; with all that an item promises checked on the way."""
    narrow, wide = plan.header[:2]
    height = wide_height(step.group_size)
    seen = {token: np.zeros(max(step.contexts, default=0) + 1, dtype=np.int64) for token in range(step.num_tokens)}
    sequence_of = np.repeat(np.arange(len(step.lengths)), step.lengths)
    shared = {s: pages * PAGE_SIZE for ids, pages in step.sharing for s in ids}
    same = table_rows(step)
    for index, item in enumerate(plan.items):
        row_start, num_rows, sequence, start, end, _, *rest = item.tolist()
        assert rest == [0, 0]
        assert num_rows == 1 if index < narrow else 1 <= num_rows <= height // step.group_size
        rows = plan.rows[row_start : row_start + num_rows].tolist()
        assert len({first < 0 for _, _, first, _ in rows}) == 1, "rows of an item are whole or in parts, all of them"
        assert start % BLOCK_KEYS == 0 or start == shared[sequence]
        for token, position, _, _ in rows:
            mine = int(sequence_of[token])
            assert position == step.contexts[mine] - (step.starts[mine + 1] - token)
            assert sequence == mine or (sequence in same[mine] and end <= shared[mine])
            if index < narrow:
                assert start < end <= position + 1, "a decode sees all keys of its items"
            lowest = 0 if step.window is None else position - step.window + 1
            seen[token][max(start, lowest, 0) : max(0, min(end, position + 1))] += 1
    assert len(plan.items) == narrow + wide
    return seen


@settings(max_examples=150)
@given(steps())
def test_each_visible_key_is_met_once(step):
    plan = step.plan()
    seen = coverage(step, plan)
    for sequence, (start, end) in enumerate(pairwise(step.starts)):
        for token in range(start, end):
            position = step.contexts[sequence] - (end - token)
            lowest = 0 if step.window is None else max(0, position - step.window + 1)
            want = np.zeros_like(seen[token])
            want[lowest : max(0, position + 1)] = 1
            assert np.array_equal(seen[token], want)


@settings(max_examples=150)
@given(steps())
def test_each_token_is_written_once_and_partials_are_its_own(step):
    plan = step.plan()
    written: Counter[int] = Counter()
    slots: Counter[int] = Counter()
    owner: dict[int, int] = {}
    for item in plan.items.tolist():
        row_start, num_rows, _, _, _, split, _, _ = item
        for token, _, first, _ in plan.rows[row_start : row_start + num_rows].tolist():
            if first < 0:
                written[token] += 1
            else:
                slots[first + split] += 1
                owner[first + split] = token
    for token, first, count, _ in plan.merges.tolist():
        written[token] += 1
        assert {owner.pop(slot) for slot in range(first, first + count)} <= {token}
    assert not owner, "partials that are merged by nobody"
    assert sorted(slots) == list(range(plan.num_partials))
    assert set(slots.values()) <= {1}
    assert written == Counter(range(step.num_tokens))


@settings(max_examples=100)
@given(steps())
def test_bounds_hold(step):
    decodes = [s for s, length in enumerate(step.lengths) if length == 1]
    alone = dataclasses.replace(
        step,
        lengths=[1] * len(decodes),
        contexts=[step.contexts[s] for s in decodes],
        sharing=[([decodes.index(s) for s in ids], pages) for ids, pages in step.sharing],
    )
    longest = max(alone.contexts, default=0)
    plan, whole = alone.plan(), step.plan()
    capacity = decode_capacity(alone.num_tokens, longest, step.window, grouped=True)
    padded = plan.padded(capacity)
    assert len(padded.items) == capacity.items
    assert np.array_equal(padded.items[: plan.num_items], plan.items)
    assert whole.num_partials == plan.num_partials, "prefills have no partials"
    if not step.sharing:
        assert plan.padded(decode_capacity(alone.num_tokens, longest, step.window)).has_wide is False


@pytest.mark.parametrize("context", [MAX_SPLITS * CHUNK, MAX_SPLITS * CHUNK + 1, 100_000, 131_072, 1_000_000])
def test_long_contexts_have_bounded_pieces(context):
    plan = Step(lengths=[1, 1], contexts=[context, 500]).plan()
    mine = plan.items[plan.items[:, 2] == 0]
    assert len(mine) <= row_splits(context, grouped=False) <= MAX_SPLITS
    assert int((mine[:, 4] - mine[:, 3]).sum()) == context
    assert len(plan.items) - len(mine) == 2, "its batch mate is cut as ever"


def test_pieces_do_not_depend_on_batch_mates():
    def pieces(contexts: list[int]) -> list[list[int]]:
        plan = Step(lengths=[1] * len(contexts), contexts=contexts).plan()
        return plan.items[plan.items[:, 2] == 0, 3:6].tolist()

    assert pieces([1000]) == pieces([1000, 5, 100_000, 256])


def test_padding_has_no_items():
    plan = Step(lengths=[1, 1, 1], contexts=[300, 0, 0], unowned=2).plan()
    assert plan.header[:4].tolist() == [2, 0, 5, 99]
    assert plan.merges[1:, 2].tolist() == [0] * 4


def test_the_longest_tiles_come_first():
    plan = Step(lengths=[1, 200, 100], contexts=[10, 200, 5000]).plan()
    tiles = plan.items[plan.header[0] :]
    cost = tiles[:, 4] - tiles[:, 3]
    assert plan.has_wide
    assert (np.diff(cost) <= 0).all()


def test_what_does_not_fit_is_refused():
    plan = Step(lengths=[1, 1], contexts=[300, 300]).plan()
    with pytest.raises(ValueError, match="partials"):
        plan.padded(dataclasses.replace(decode_capacity(2, 300), partials=3))
    with pytest.raises(ValueError, match="entries"):
        plan.padded(dataclasses.replace(decode_capacity(2, 300), items=3))
    assert work_list.narrow_height(3) == 16
