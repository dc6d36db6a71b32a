"""The engine with order, admission and eviction by the future: same answers, and what the rules promise."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nightmill.sampling import SamplingParams
from nightmill.states import Tier
from nightmill_worker.engine.drill import Drill
from nightmill_worker.engine.fake import FakeRunnerConfig
from nightmill_worker.engine.options import AdmissionRule, EvictionRule, LoopOptions, QueueOrder
from nightmill_worker.engine.request import FinishReason, Request

PLANNED = {"order": "planned", "admission": "growth", "eviction": "future"}


def drill(*, num_pages=64, page_size=4, **options):
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 512, **PLANNED, **options}
    return Drill(FakeRunnerConfig(num_pages=num_pages, page_size=page_size), LoopOptions(**options))


def request(key, prompt, max_tokens, *, known=True, tier=Tier.NORMAL, job_id="job"):
    return Request(
        request_id=key,
        job_id=job_id,
        tier=tier,
        prompt=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=known),
        seed=key,
        # The fake's tokens are hashes: about one in twelve of these ends an answer.
        eos_token_ids=() if known else tuple(range(0, 1000, 12)),
    )


REQUESTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), max_size=5),  # pages of a small alphabet: prefixes collide
        st.integers(1, 9),  # tokens of its own
        st.integers(1, 30),
        st.booleans(),
        st.sampled_from(list(Tier)),
        st.sampled_from("ab"),
    ),
    min_size=1,
    max_size=25,
)


def build(specs):
    return [
        request(
            key,
            [t for page in pages for t in (page + 1,) * 4] + [100 + key] * own,
            out,
            known=known,
            tier=tier,
            job_id=job,
        )
        for key, (pages, own, out, known, tier, job) in enumerate(specs)
    ]


@settings(deadline=None, max_examples=60)
@given(
    REQUESTS,
    st.sampled_from(list(QueueOrder)),
    st.sampled_from(list(AdmissionRule)),
    st.sampled_from(list(EvictionRule)),
    st.integers(12, 60),
    st.integers(1, 8),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_answers_and_invariants_hold_under_every_rule(specs, order, admission, eviction, pages, slots, caching, seed):
    engine = drill(
        num_pages=pages,
        max_num_seqs=slots,
        enable_prefix_caching=caching,
        order=order,
        admission=admission,
        eviction=eviction,
    )
    rng, pending = random.Random(seed), build(specs)
    cancelled = set()
    while pending or engine.loop.has_work:
        action = rng.random()
        if pending and action < 0.5:
            engine.add(pending.pop())
        elif action < 0.55:
            victim = rng.randrange(len(specs))
            cancelled.add(victim)
            engine.cancel(victim)
        elif action < 0.60:
            engine.preempt(rng.randrange(len(specs)))
        else:
            engine.step()
    answers = engine.drain()
    assert {key for key, a in answers.items() if a.finish_reason is FinishReason.ABORT} <= cancelled
    index = engine.loop.index
    if index is not None:
        assert all(node.wanted == 0 for node in index._nodes.values())
    assert len(engine.loop.queue) == 0


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.tuples(st.integers(1, 90), st.integers(1, 80)), min_size=1, max_size=40),
    st.integers(1, 12),
    st.integers(45, 120),
    st.sampled_from([16, 64, 200]),
    st.sampled_from(list(QueueOrder)),
)
def test_known_lengths_are_never_preempted_for_memory(specs, slots, pages, budget, order):
    engine = drill(num_pages=pages, max_num_seqs=slots, max_num_batched_tokens=budget, order=order, tier_reserve=0.0)
    engine.add(*(request(key, [100 + key] * prompt, out) for key, (prompt, out) in enumerate(specs)))
    engine.drain()
    assert engine.loop.stats().preemptions == 0


@settings(deadline=None, max_examples=60)
@given(REQUESTS, st.integers(30, 80), st.integers(1, 10))
def test_known_lengths_with_shared_prefixes_are_never_preempted_for_memory(specs, pages, slots):
    engine = drill(num_pages=pages, max_num_seqs=slots, tier_reserve=0.0)
    known = [(p, own, out, True, Tier.NORMAL, job) for p, own, out, _, _, job in specs]
    engine.add(*build(known))
    engine.drain()
    assert engine.loop.stats().preemptions == 0


def grouped(groups, rows, seed=3):
    """A shuffled file: groups share 8 pages of 4 tokens, each row adds 5 tokens of its own."""
    requests = [
        request(g * rows + r, [g + 1] * 32 + [200 + g * rows + r] * 5, 6) for g in range(groups) for r in range(rows)
    ]
    random.Random(seed).shuffle(requests)
    return requests


def saved_share(groups, rows, **rules):
    # Two groups: 2 · (8 shared pages + the rows' own), and the null page.
    engine = drill(num_pages=2 * (8 + rows * 3) + 1, max_num_seqs=64, **rules)
    engine.add(*grouped(groups, rows))
    engine.drain()
    return engine.loop.stats().cached_tokens / (groups * (rows - 1) * 32), engine.loop.stats()


def test_a_shuffled_file_computes_each_prefix_once_when_the_pool_holds_two_groups():
    planned, stats = saved_share(24, 12)
    arrival, _ = saved_share(24, 12, order="arrival", admission="greedy", eviction="lru")
    assert planned >= 0.99
    assert arrival < 0.6
    assert stats.wanted_evictions == 0


def test_a_page_that_waiting_requests_want_outlives_one_used_later():
    engine = drill(num_pages=13, max_num_seqs=1, order="arrival", admission="greedy")
    wanted, other = [1] * 12, [2] * 12
    engine.add(request(0, [*wanted, 9], 1), request(1, [*other, 9], 1), request(2, [7] * 32, 1))
    engine.add(request(3, [*wanted, 8], 1))
    answers = engine.drain()
    assert answers[3].num_cached_tokens == 12
    lru = drill(num_pages=13, max_num_seqs=1, order="arrival", admission="greedy", eviction="lru")
    lru.add(request(0, [*wanted, 9], 1), request(1, [*other, 9], 1), request(2, [7] * 32, 1))
    lru.add(request(3, [*wanted, 8], 1))
    assert lru.drain()[3].num_cached_tokens < 12


def test_a_request_that_fits_only_alone_runs_alone():
    engine = drill(num_pages=21, tier_reserve=0.5)
    engine.add(request(0, [5] * 60, 20), request(1, [6] * 4, 2), request(2, [7] * 4, 2))
    answers = engine.drain()
    assert all(a.finish_reason is FinishReason.LENGTH for a in answers.values())


def test_lengths_are_learnt_from_answers_that_end_by_themselves():
    engine = drill(num_pages=400, max_num_seqs=4)
    engine.add(*(request(key, [3 + key] * 5, 300, known=False) for key in range(80)))
    before = engine.loop.lengths.expected("job", "normal", 300)
    answers = engine.drain()
    mean = sum(len(a.token_ids) for a in answers.values()) / 80
    after = engine.loop.lengths.expected("job", "normal", 300)
    assert abs(after - mean) < 0.5 * mean < abs(before - mean)


@pytest.mark.parametrize("name", ["order", "admission", "eviction"])
def test_unknown_rules_are_refused(name):
    with pytest.raises(Exception, match=f"{name} must be one of"):
        LoopOptions(**{name: "magic"})


@pytest.mark.parametrize("seed", [6, 68, 74, 130, 144, 159, 185, 193])
def test_prompts_that_take_many_steps_delay_growth_and_ends(seed):
    rng = random.Random(seed)
    requests = [request(k, [100 + k] * rng.randint(1, 150), rng.randint(1, 40)) for k in range(rng.randint(5, 30))]
    pages, slots, budget = rng.randint(50, 130), rng.randint(3, 12), rng.choice([12, 16, 24])
    engine = drill(
        num_pages=pages, max_num_seqs=slots, max_num_batched_tokens=budget, tier_reserve=0.0, order="arrival"
    )
    engine.add(*requests)
    engine.drain()
    assert engine.loop.stats().preemptions == 0


@pytest.mark.parametrize("seed", [0, 10, 13, 15, 61, 63, 71, 130, 144, 222])
def test_a_prefix_outlives_the_sequence_that_computed_it(seed):
    rng = random.Random(seed)
    requests = [
        request(k, [rng.randint(1, 2)] * 40 + [100 + k] * rng.randint(1, 8), rng.randint(1, 60))
        for k in range(rng.randint(4, 20))
    ]
    engine = drill(num_pages=rng.randint(30, 60), max_num_seqs=rng.randint(2, 8), tier_reserve=0.0, order="arrival")
    engine.add(*requests)
    engine.drain()
    assert engine.loop.stats().preemptions == 0


def test_a_running_sequence_no_longer_counts_as_waiting_for_its_prefix():
    engine = drill(max_num_seqs=1)
    engine.add(request(0, [1] * 12, 5), request(1, [1] * 12, 5))
    index = engine.loop.index
    assert {node.wanted for node in index._nodes.values()} == {2}
    engine.step()
    assert {node.wanted for node in index._nodes.values()} == {1}
    engine.cancel(1)
    assert {node.wanted for node in index._nodes.values()} == {0}
