"""What runs in which step: budgets, chunks, tiers, policies."""

import pytest

from nightmill.errors import ConfigError
from nightmill.states import Tier
from nightmill_worker.engine.options import LoopOptions


@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("chunk", [1, 15, 16, 17, None])
def test_every_chunk_size_is_exact(make_drill, make_request, page_size, chunk):
    drill = make_drill(page_size=page_size, max_prefill_chunk=chunk)
    drill.add(*(make_request(i, length) for i, length in enumerate((1, 15, 16, 17, 31, 32, 33, 64, 100))))
    drill.drain()


def test_chunk_that_is_not_the_last_draws_no_token(make_drill, make_request):
    drill = make_drill(max_prefill_chunk=16)
    drill.add(make_request(1, 40, max_tokens=2))
    generated = []
    while drill.loop.has_work:
        drill.step()
        generated.append(drill.loop.stats().generated_tokens)
    assert generated == [0, 0, 1, 2]


def test_prefill_rides_on_decode_steps(make_drill, make_request):
    drill = make_drill(max_num_batched_tokens=17, max_num_seqs=4)
    drill.add(make_request(1, 10, max_tokens=20))
    drill.step()
    drill.add(make_request(2, 32, max_tokens=1))
    drill.step()
    drill.step()
    stats = drill.loop.stats()
    assert stats.steps == 3
    assert stats.generated_tokens == 4  # one token of request 1 per step, and the first of request 2 after two chunks
    drill.drain()


def test_place_of_the_finished_is_taken_in_the_next_step(make_drill, make_request):
    drill = make_drill(max_num_seqs=2)
    drill.add(*(make_request(i, 4, max_tokens=1 + 3 * (i % 2)) for i in range(6)))
    while drill.loop.has_work:
        waiting, before = drill.loop.stats().waiting, drill.loop.counters.batch_rows
        drill.step()
        if waiting:
            assert drill.loop.counters.batch_rows - before == 2
    assert drill.loop.stats().steps == 8  # 15 tokens, the longest first


def test_higher_tier_is_admitted_first(make_drill, make_request):
    drill = make_drill(max_num_seqs=1)
    drill.add(make_request(1, 4, max_tokens=2), make_request(2, 4, max_tokens=1, tier=Tier.LOW))
    drill.step()
    drill.add(make_request(3, 4, max_tokens=1), make_request(4, 4, max_tokens=1, tier=Tier.HIGH))
    order = []
    while drill.loop.has_work:
        order += [answer.request_id for answer in drill.step()]
    assert order == [1, 4, 3, 2]


def test_nobody_of_a_lower_tier_takes_pages_that_a_higher_one_waits_for(make_drill, make_request):
    drill = make_drill(num_pages=11, page_size=4, max_num_seqs=4)
    drill.add(make_request(1, 16, max_tokens=8, tier=Tier.HIGH))
    drill.step()
    drill.add(make_request(2, 24, max_tokens=4, tier=Tier.HIGH), make_request(3, 2, max_tokens=2, tier=Tier.LOW))
    while 1 not in drill.answers:
        drill.step()
        assert drill.loop.stats().waiting == 2
    drill.drain()


def test_partial_prefill_goes_on_before_an_admission_of_its_tier(make_drill, make_request):
    drill = make_drill(max_num_batched_tokens=16, max_num_seqs=4)
    drill.add(make_request(1, 40, max_tokens=1), make_request(2, 4, max_tokens=1))
    drill.step()
    assert drill.loop.stats().running == 1
    drill.step()
    assert drill.loop.stats().running == 1
    drill.step()
    assert drill.loop.stats().finished == 2


def eight(make_request, k=1):
    """k copies of six requests of 20 tokens and two of 200."""
    return [make_request(i, 4, max_tokens=200 if i % 8 >= 6 else 20) for i in range(8 * k)]


def test_static_group_ends_with_its_longest_row(make_drill, make_request):
    drill = make_drill(policy="static", max_num_seqs=8, num_pages=512)
    drill.add(*eight(make_request))
    drill.drain()
    stats = drill.loop.stats()
    assert stats.steps == 200
    assert stats.generated_tokens == 520
    assert stats.padding_tokens == 6 * 180
    assert stats.mean_batch == pytest.approx(520 / 200)


@pytest.mark.parametrize(("policy", "steps"), [("static", 800), ("continuous", 260)])
def test_four_copies_of_eight(make_drill, make_request, policy, steps):
    drill = make_drill(policy=policy, max_num_seqs=8, num_pages=512)
    drill.add(*eight(make_request, 4))
    drill.drain()
    assert steps <= drill.loop.stats().steps <= steps * (1 if policy == "static" else 1.6)


def test_static_group_is_whole_even_when_its_prompts_take_several_steps(make_drill, make_request):
    drill = make_drill(policy="static", max_num_seqs=4, max_num_batched_tokens=16)
    drill.add(*(make_request(i, 20, max_tokens=3) for i in range(5)))
    drill.step()
    assert (drill.loop.stats().running, drill.loop.stats().waiting) == (4, 1)
    drill.drain()


def test_static_answers_are_the_same(make_drill, make_request):
    prefix = tuple(range(40))
    drill = make_drill(policy="static", max_num_seqs=3)
    drill.add(*(make_request(i, (*prefix, i), max_tokens=1 + i * 5 % 17) for i in range(10)))
    drill.drain()
    assert drill.loop.stats().preemptions == 0


def test_static_takes_no_more_than_the_pool_can_end(make_drill, make_request):
    drill = make_drill(policy="static", max_num_seqs=4, num_pages=11, page_size=4)
    drill.add(*(make_request(i, 8, max_tokens=9) for i in range(4)))  # four pages each
    drill.step()
    assert drill.loop.stats().running == 2
    drill.drain()
    assert drill.loop.stats().preemptions == 0


def test_static_row_can_be_cancelled_and_the_group_ends(make_drill, make_request):
    drill = make_drill(policy="static", max_num_seqs=3)
    drill.add(*(make_request(i, 8, max_tokens=2 + 20 * (i == 0)) for i in range(3)), make_request(3, 8))
    drill.step()
    drill.step()
    drill.cancel(0)
    assert drill.loop.pool.num_active == 0
    assert drill.drain()[3].finish_reason == "length"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, not 0"),
        ({"max_num_seqs": 65, "max_num_batched_tokens": 64}, "must be at least max_num_seqs"),
        ({"policy": "dynamic"}, "policy must be one of continuous, static, not 'dynamic'"),
        ({"max_prefill_chunk": 0}, "max_prefill_chunk must be at least 1"),
    ],
)
def test_bad_limits_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        LoopOptions(**options)
