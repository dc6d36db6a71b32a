"""The bound of a step, against sums taken token by token and against the simulator's formula."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightmill.sampling import SamplingParams
from nightmill.states import Tier
from nightmill_worker.engine.fake import FakeRunner
from nightmill_worker.engine.loop import EngineLoop
from nightmill_worker.engine.options import LoopOptions
from nightmill_worker.engine.request import Request
from nightmill_worker.engine.roofline import FULL, Ceilings, ModelCost, Roofline, Work, step_work
from nightmill_worker.engine.stats import EngineStats, roofline_share
from nightmill_worker.engine.step import PrefixGroups, SampleBatch, StepPlan
from nightmill_worker.simulate.cost_model import DEVICES, MODELS, CostModel

PAGE = 4
# One layer of one head of 2 dimensions, 10 weights in the body, 6 in the head, two bytes each.
COST = ModelCost(token_flops=20, logit_flops=12, attention_flops=8, weight_bytes=32, kv_bytes=8)


def make_plan(counts: list[int], contexts: list[int], groups: PrefixGroups | None = None, draws: int = 0) -> StepPlan:
    rows, starts = len(counts), np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    names = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    sample = SampleBatch(
        sequence=np.arange(draws, dtype=np.int32),
        token_index=starts[1 : draws + 1] - 1,
        position=np.zeros(draws, np.int64),
        seed=np.zeros(draws, np.uint64),
        top_k=np.zeros(draws, np.int32),
        num_logprobs=np.full(draws, -1, np.int32),
        any_random=False,
        **{name: np.zeros(draws, np.float32) for name in names},
    )
    tokens = int(starts[-1])
    return StepPlan(
        step=0,
        token_ids=np.zeros(tokens, np.int32),
        positions=np.zeros(tokens, np.int32),
        slots=np.zeros(tokens, np.int64),
        query_starts=starts,
        context_lens=np.array(contexts, np.int32),
        page_tables=np.zeros((rows, 1), np.int32),
        sample=sample,
        groups=groups,
    )


def make_groups(*groups: tuple[list[int], int]) -> PrefixGroups:
    starts = np.cumsum([0, *(len(rows) for rows, _ in groups)], dtype=np.int32)
    sequences = np.array([row for rows, _ in groups for row in rows], np.int32)
    return PrefixGroups(starts=starts, sequences=sequences, num_pages=np.array([n for _, n in groups], np.int32))


def counted(plan: StepPlan, window: int | None) -> tuple[int, int]:
    """(tokens seen, keys read), one by one: each row's keys as a set, those of a group's pages as one."""
    seen, read, shared = 0, set(), {}
    if plan.groups is not None:
        for n, pages in enumerate(plan.groups.num_pages.tolist()):
            for s in plan.groups.sequences[plan.groups.starts[n] : plan.groups.starts[n + 1]].tolist():
                shared[s] = (n, pages * PAGE)
    for s, context in enumerate(plan.context_lens.tolist()):
        group, common = shared.get(s, (None, 0))
        for position in range(context - int(plan.query_starts[s + 1] - plan.query_starts[s]), context):
            first = 0 if window is None else max(0, position - window + 1)
            seen += position + 1 - first
            read |= {("group", group, key) if key < common else ("row", s, key) for key in range(first, position + 1)}
    return seen, len(read)


def test_a_step_by_hand() -> None:
    # A chunk of 2 tokens at the end of 5, and a decode at 3; only the decode draws.
    plan = make_plan([2, 1], [5, 3], draws=1)
    work = step_work(plan)
    assert work == Work(tokens=3, logit_rows=1, attended=(4 + 5) + 3, context_read=5 + 3)
    assert COST.linear_flops(work) == 3 * 20 + 12
    assert COST.all_flops(work) == 72 + 8 * 12
    assert COST.cache_bytes(work) == 8 * (8 + 3)
    assert COST.all_bytes(work) == 32 + 88
    # At 36 FLOP/s and 4 bytes/s: weights 8 s against 2, keys and values 22 s against 96 / 36.
    assert Roofline(COST, Ceilings(flops=36, bytes_per_s=4)).seconds(work) == 8 + 22
    # With a hundredth of the FLOPs, arithmetic takes longer, everywhere.
    assert Roofline(COST, Ceilings(flops=0.36, bytes_per_s=4)).seconds(work) == pytest.approx((72 + 96) / 0.36)


def test_a_shared_prefix_is_read_once_per_group() -> None:
    groups = make_groups(([0, 2, 3], 2), ([1, 4], 1))
    plan = make_plan([1] * 5, [20, 9, 10, 30, 7], groups)
    alone, shared = step_work(plan), step_work(plan, page_size=PAGE)
    assert alone.context_read == 76
    assert shared.context_read == 76 - 2 * 2 * PAGE - PAGE
    assert shared.attended == alone.attended == 76


@pytest.mark.parametrize("model", list(MODELS))
def test_agrees_with_the_simulator(model: str) -> None:
    shape, device = MODELS[model], DEVICES["h200"]
    cost = ModelCost(
        token_flops=2 * shape.body_parameters,
        logit_flops=2 * shape.head_parameters,
        attention_flops=4 * shape.layers * shape.heads * shape.head_dim,
        weight_bytes=shape.step_weight_bytes,
        kv_bytes=shape.kv_bytes_per_token,
    )
    roofline = Roofline(cost, Ceilings(device.flops, device.bytes_per_s))
    for plan in (make_plan([1] * 64, [900] * 64, draws=64), make_plan([512, 1, 1], [700, 40, 1], draws=3)):
        assert roofline.seconds(step_work(plan)) == CostModel(device, shape).step_seconds(plan)


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    counts = draw(st.lists(st.integers(1, draw(st.sampled_from([1, 9]))), min_size=1, max_size=7))
    contexts = [count + draw(st.integers(0, 40)) for count in counts]
    decodes = [s for s, count in enumerate(counts) if count == 1]
    groups = [rows for rows in (decodes[: len(decodes) // 2], decodes[len(decodes) // 2 :]) if len(rows) > 1]
    shared = [(rows, (min(contexts[s] for s in rows) - 1) // PAGE) for rows in groups]
    return make_plan(counts, contexts, make_groups(*shared) if shared else None)


@given(plan=plans(), windows=st.lists(st.one_of(st.none(), st.integers(1, 50)), min_size=1, max_size=3))
def test_agrees_with_counting(plan: StepPlan, windows: list[int | None]) -> None:
    share = 1 / len(windows)
    work = step_work(plan, tuple((window, share) for window in windows), PAGE)
    expected = np.mean([counted(plan, window) for window in windows], axis=0)
    assert (work.attended, work.context_read) == pytest.approx(tuple(expected))


def test_an_empty_group_list_saves_nothing() -> None:
    plan = make_plan([1], [9], make_groups())
    assert step_work(plan, ((None, 0.5), (4, 0.5)), PAGE).context_read == (9 + 4) / 2
    assert step_work(plan, FULL, PAGE).context_read == 9


class BoundedRunner(FakeRunner):
    roofline = Roofline(COST, Ceilings(flops=1e6, bytes_per_s=1e5))


def run_four(runner: FakeRunner) -> EngineStats:
    loop = EngineLoop(runner, LoopOptions(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=100))
    for i in range(4):
        sampling = SamplingParams(max_tokens=3, ignore_eos=True)
        loop.add(Request(request_id=i, job_id="job", tier=Tier.LOW, prompt=(i, 5, 6), sampling=sampling, seed=i))
    while loop.has_work:
        loop.step()
    return loop.stats()


def test_the_engine_adds_up_its_steps() -> None:
    stats = run_four(BoundedRunner())
    # Four prompts of 3 and two decodes each; each step draws for all.
    works = [Work(12, 4, 4 * (1 + 2 + 3), 12), Work(4, 4, 16, 16), Work(4, 4, 20, 20)]
    assert stats.steps == 3
    assert stats.bytes == sum(COST.all_bytes(work) for work in works)
    assert stats.flops == sum(COST.all_flops(work) for work in works)
    assert stats.bound_s == pytest.approx(sum(BoundedRunner.roofline.seconds(work) for work in works))
    assert stats.roofline_share == pytest.approx(stats.bound_s / max(stats.run_s, stats.device_s))


def test_a_runner_without_a_roofline_has_no_share() -> None:
    stats = run_four(FakeRunner())
    assert (stats.bytes, stats.flops, stats.bound_s, stats.roofline_share) == (0, 0, 0, None)
    assert roofline_share([]) is None


def test_shares_of_engines_add_up() -> None:
    one = replace(run_four(FakeRunner()), bound_s=1.0, run_s=2.0, device_s=1.5)
    ahead = replace(one, bound_s=3.0, run_s=0.5, device_s=6.0)  # the device worked while the host did
    assert roofline_share([one, ahead]) == (1 + 3) / (2 + 6)
