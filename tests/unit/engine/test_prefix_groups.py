"""Which rows are grouped by the pages they have in common, and that the plan's groups are true."""

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightmill.errors import EngineError
from nightmill.sampling import SamplingParams
from nightmill.states import Tier
from nightmill_worker.engine.audit import audit_plan
from nightmill_worker.engine.fake import FakeRunnerConfig
from nightmill_worker.engine.groups import MIN_ROWS, MIN_TOKENS, GroupFinder, find_groups, tokens_saved
from nightmill_worker.engine.loop import EngineLoop
from nightmill_worker.engine.options import LoopOptions
from nightmill_worker.engine.request import Request
from nightmill_worker.engine.step import PoolShape, PrefixGroups, SampleBatch, StepPlan

PAGE = 16
PREFIX = tuple(range(100, 300))  # 12 full pages of 16


def tables_of(*rows: list[int]) -> np.ndarray:
    """Page tables of rows, which are given as page ids."""
    width = max(len(row) for row in rows)
    return np.array([row + [0] * (width - len(row)) for row in rows], np.int32)


def own(row: int, count: int) -> list[int]:
    return list(range(1000 + 100 * row, 1000 + 100 * row + count))


def found(rows: list[list[int]], contexts: list[int] | None = None, counts: list[int] | None = None):
    """Groups as {frozenset of rows: pages}."""
    contexts = contexts or [PAGE * len(row) - 3 for row in rows]
    counts = counts or [1] * len(rows)
    groups = find_groups(tables_of(*rows), np.array(contexts, np.int32), np.array(counts, np.int64), PAGE)
    return as_sets(groups)


def as_sets(groups: PrefixGroups | None) -> dict[frozenset[int], int]:
    if groups is None:
        return {}
    pairs = zip(groups.starts[:-1], groups.starts[1:], groups.num_pages, strict=True)
    return {frozenset(groups.sequences[a:b].tolist()): int(pages) for a, b, pages in pairs}


def test_rows_with_the_same_first_pages_are_one_group():
    prefix = list(range(1, 11))
    assert found([prefix + own(i, 2 + i) for i in range(5)]) == {frozenset(range(5)): 10}


def test_several_groups_among_rows_of_their_own_in_any_order():
    a, b = list(range(1, 10)), list(range(20, 40))
    rows = [(a, b, [])[i % 3] + own(i, 25) for i in range(15)]
    assert found(rows) == {frozenset(range(0, 15, 3)): 9, frozenset(range(1, 15, 3)): 20}


@pytest.mark.parametrize(("rows", "tokens", "grouped"), [(4, 128, True), (3, 1024, False), (100, 112, False)])
def test_thresholds(rows, tokens, grouped):
    assert (MIN_ROWS, MIN_TOKENS) == (4, 128)
    prefix = list(range(1, 1 + tokens // PAGE))
    assert bool(found([prefix + own(i, 70) for i in range(rows)])) == grouped


def test_chunks_and_padding_of_the_table_are_no_decodes():
    prefix = list(range(1, 11))
    rows = [prefix + own(i, 3) for i in range(6)]
    assert found(rows, counts=[1, 1, 5, 1, 1, 1]) == {frozenset({0, 1, 3, 4, 5}): 10}
    assert found(rows, counts=[1, 1, 5, 1, 2, 30]) == {}
    short = [[7] for _ in range(10)]
    assert found(short) == {}, "null pages are not shared"


def test_pages_that_are_not_full_are_not_shared():
    prefix = list(range(1, 11))
    assert found([list(prefix) for _ in range(4)], contexts=[PAGE * 9 + 5] * 4) == {frozenset(range(4)): 9}


def test_the_cut_that_saves_most_is_taken():
    system = list(range(1, 9))
    few_shot = {task: [*range(50 * task, 50 * task + 40)] for task in (1, 2)}
    rows = [system + few_shot[1 + i % 2] + own(i, 2) for i in range(10)]
    # 2 · 4 · 48 pages against 9 · 8.
    assert found(rows) == {frozenset(range(0, 10, 2)): 48, frozenset(range(1, 10, 2)): 48}
    few = [system + own(i, 2) for i in range(60)] + [system + few_shot[1] + own(60 + i, 2) for i in range(4)]
    # 63 · 8 pages against 3 · 48.
    assert found(few) == {frozenset(range(64)): 8}


def test_the_cut_is_chosen_for_each_prefix_apart():
    a, b, deep = list(range(1, 9)), list(range(20, 28)), list(range(30, 70))
    rows = [a + deep + own(i, 1) for i in range(4)] + [b + own(4 + i, 1) for i in range(6)]
    assert found(rows) == {frozenset(range(4)): 48, frozenset(range(4, 10)): 8}


@given(data=st.data())
def test_groups_are_true_whatever_the_tables(data):
    """Random forests of prefixes, and tables that no engine makes: the same id after different ones."""
    page_size = data.draw(st.sampled_from([1, 8, 16, 48, 128, 200]))
    width = data.draw(st.integers(1, 40))
    pages = st.integers(1, data.draw(st.sampled_from([2, 500])))
    stems = data.draw(st.lists(st.lists(pages, min_size=width, max_size=width), min_size=1, max_size=4))
    rows, contexts = [], []
    for _ in range(data.draw(st.integers(0, 24))):
        stem, keep = data.draw(st.sampled_from(stems)), data.draw(st.integers(0, width))
        rows.append(stem[:keep] + data.draw(st.lists(pages, min_size=width - keep, max_size=width - keep)))
        contexts.append(data.draw(st.integers(1, width * page_size)))
    tables = np.array(rows, np.int32).reshape(len(rows), width)
    contexts = np.array(contexts, np.int32)
    tables[np.arange(width) >= -(-contexts[:, None] // page_size)] = 0
    counts = np.array([data.draw(st.sampled_from([1, 1, 1, 2])) for _ in rows], np.int64)
    groups = as_sets(find_groups(tables, contexts, counts, page_size))
    seen = [row for members in groups for row in members]
    assert len(seen) == len(set(seen))
    for members, shared in groups.items():
        assert len(members) >= MIN_ROWS
        assert shared * page_size >= MIN_TOKENS
        assert all(counts[row] == 1 and contexts[row] >= shared * page_size for row in members)
        assert len({tuple(tables[row, :shared].tolist()) for row in members}) == 1
        assert (tables[min(members), :shared] != 0).all()


@given(data=st.data())
def test_a_common_prefix_is_never_missed(data):
    rows, shared = data.draw(st.integers(4, 40)), data.draw(st.integers(8, 60))
    others = data.draw(st.integers(0, 20))
    tables = [list(range(1, 1 + shared)) + own(i, 1 + i % 3) for i in range(rows)]
    tables += [own(100 + i, shared) for i in range(others)]
    order = data.draw(st.permutations(range(rows + others)))
    assert found([tables[i] for i in order]) == {frozenset(k for k, i in enumerate(order) if i < rows): shared}


def test_tokens_saved():
    groups = PrefixGroups(
        starts=np.array([0, 4, 9], np.int32),
        sequences=np.arange(9, dtype=np.int32),
        num_pages=np.array([8, 3], np.int32),
    )
    assert tokens_saved(groups, PAGE) == (3 * 8 + 4 * 3) * PAGE


# ---------------------------------------------------------------- in the loop


def test_the_loop_groups_what_the_prefix_index_shares(make_drill, make_request):
    drill = make_drill(max_model_len=400, num_pages=400)
    drill.add(*(make_request(i, (*PREFIX, i, i), max_tokens=10 + i) for i in range(6)))
    drill.add(make_request(9, 150, max_tokens=20))
    drill.drain()
    stats = drill.loop.stats()
    # Six rows decode together until the first ends after 9 more steps, five one more, four one more.
    assert stats.shared_attention_rows >= 6 * 8
    saved = stats.shared_attention_bytes_saved
    assert saved > 0
    assert saved % (12 * PAGE * drill.runner.pool.bytes_per_token) == 0


@pytest.mark.parametrize("off", [{"enable_shared_attention": False}, {"enable_prefix_caching": False}])
def test_the_loop_groups_nothing_when_told_not_to(make_drill, make_request, off):
    drill = make_drill(max_model_len=400, num_pages=400, **off)
    drill.add(*(make_request(i, (*PREFIX, i), max_tokens=10) for i in range(6)))
    drill.drain()
    assert drill.loop.stats().shared_attention_rows == 0


def test_groups_stay_true_when_rows_come_and_go(make_drill, make_request):
    """The fake model audits every plan's groups, and its answers show a wrong page."""
    drill = make_drill(max_model_len=400, num_pages=90, max_num_seqs=8, max_num_batched_tokens=64)
    drill.add(*(make_request(i, (*PREFIX[: 130 + 40 * (i % 2)], i), max_tokens=5 + i % 9) for i in range(24)))
    for step in range(60):
        drill.step()
        if step % 3 == 0:
            drill.preempt(step % 24)
        if step % 11 == 0:
            drill.cancel(23 - step // 11)
    drill.drain()
    assert drill.loop.stats().shared_attention_rows > 20


def plan_with(groups: PrefixGroups) -> StepPlan:
    tables = tables_of(*(list(range(1, 11)) + own(i, 2) for i in range(5)))
    contexts = np.full(5, 12 * PAGE - 4, np.int32)
    nothing = np.empty(0)
    names = [f.name for f in dataclasses.fields(SampleBatch) if f.name not in ("any_random", "history", "banned")]
    sample = SampleBatch(**{name: nothing.astype(np.int32) for name in names}, any_random=False)
    return StepPlan(
        step=0,
        token_ids=np.zeros(5, np.int32),
        positions=contexts - 1,
        slots=tables[:, 11].astype(np.int64) * PAGE + (contexts - 1) % PAGE,
        query_starts=np.arange(6, dtype=np.int32),
        context_lens=contexts,
        page_tables=tables,
        sample=sample,
        groups=groups,
    )


@pytest.mark.parametrize(
    ("starts", "sequences", "pages", "what"),
    [
        ([0, 4], [0, 1, 2, 3], [11], "same page ids"),
        ([0, 4], [0, 1, 2, 3], [12], "full"),
        ([0, 4], [0, 1, 2, 2], [10], "one group"),
        ([0, 2, 4], [0, 1, 1, 2], [10, 10], "one group"),
        ([0, 4], [0, 1, 2, 5], [10], "step's sequences"),
        ([0, 3], [0, 1, 2, 3], [10], "span"),
        ([0, 1, 4], [0, 1, 2, 3], [10, 10], "to share"),
    ],
)
def test_the_audit_finds_false_groups(starts, sequences, pages, what):
    pool = PoolShape(num_pages=2000, page_size=PAGE, bytes_per_token=1)

    def groups(starts: list[int], sequences: list[int], pages: list[int]) -> PrefixGroups:
        return PrefixGroups(
            starts=np.array(starts, np.int32),
            sequences=np.array(sequences, np.int32),
            num_pages=np.array(pages, np.int32),
        )

    audit_plan(plan_with(groups([0, 4], [0, 1, 2, 3], [10])), pool, 10)
    with pytest.raises(EngineError, match=what):
        audit_plan(plan_with(groups(starts, sequences, pages)), pool, 10)


def test_the_finder_says_what_a_fresh_look_would(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = 0
    find = GroupFinder.find

    def checked(
        self: GroupFinder, rows: Any, version: int, page_tables: Any, context_lens: Any, counts: Any
    ) -> PrefixGroups | None:
        nonlocal kept
        before = self._groups
        groups = find(self, rows, version, page_tables, context_lens, counts)
        kept += groups is before and groups is not None
        fresh = find_groups(page_tables, context_lens, counts, self._page_size)
        assert (groups is None) == (fresh is None)
        if groups is not None and fresh is not None:
            for name in ("starts", "sequences", "num_pages"):
                assert getattr(groups, name).tolist() == getattr(fresh, name).tolist()
        return groups

    monkeypatch.setattr(GroupFinder, "find", checked)
    rng = random.Random(3)
    loop = EngineLoop(FakeRunnerConfig(num_pages=400, page_size=8).build(), LoopOptions(max_num_seqs=24))
    prefixes = [tuple(rng.randrange(1000) for _ in range(length)) for length in (152, 152, 304)]
    for i in range(200):
        # With one token of its own, a row that takes another's place decodes at once: nothing else tells them apart.
        own = rng.choice([1, 1, 1, 20])
        prompt = (*prefixes[rng.randrange(3)], *(rng.randrange(1000) for _ in range(own)))
        sampling = SamplingParams(max_tokens=rng.randrange(20, 60))
        loop.add(Request(request_id=i, job_id="j", tier=Tier.NORMAL, prompt=prompt, sampling=sampling, seed=i))
    while loop.has_work:
        loop.step()
    assert kept > 100
