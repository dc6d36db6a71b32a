"""Preemption by recompute: who goes, what it keeps, and that it ends."""

import pytest

from nightmill.states import Tier

SAMPLINGS = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "top_k": 5},
    "penalties": {"presence_penalty": 0.5, "repetition_penalty": 1.2},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": tuple(range(0, 30))},
    "logprobs": {"logprobs": 2, "temperature": 1.0},
}


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("at", range(1, 14))
def test_preempted_sequence_loses_nothing(make_drill, make_request, name, at):
    drill = make_drill(page_size=4, vocab_size=40, max_prefill_chunk=8)
    drill.add(make_request(1, (1, 2, 3, 4, 5, 6, 7, 8, 9, 10), max_tokens=12, **SAMPLINGS[name]))
    for _ in range(at):
        drill.step()
    was_running = drill.preempt(1)
    answer = drill.drain()[1]
    assert answer.num_preemptions == int(was_running)
    if name == "logprobs":
        assert [entry.token_id for entry in answer.logprobs] == list(answer.token_ids)


@pytest.mark.parametrize("at", range(1, 12))
def test_stop_string_is_found_across_a_preemption(make_drill, make_request, at):
    drill = make_drill(vocab_size=26)
    drill.add(make_request(1, (1, 2, 3), max_tokens=12))
    text = "".join(chr(ord("a") + t) for t in drill.drain()[1].token_ids)
    drill.add(make_request(2, (1, 2, 3), max_tokens=12, stop=(text[8:11],)))
    for _ in range(at):
        drill.step()
    drill.preempt(2)
    assert drill.drain()[2].stop_match == text[8:11]


def test_the_latest_of_the_lowest_tier_goes_first(make_drill, make_request):
    drill = make_drill(num_pages=13, page_size=4, max_num_seqs=3)
    drill.add(make_request(1, 8, max_tokens=20, tier=Tier.LOW), make_request(2, 8, max_tokens=20, tier=Tier.HIGH))
    drill.add(make_request(3, 8, max_tokens=20, tier=Tier.LOW))
    answers = drill.drain()
    assert answers[2].num_preemptions == 0
    assert answers[1].num_preemptions <= answers[3].num_preemptions
    assert answers[3].num_preemptions > 0


def test_equal_tiers_do_not_play_ping_pong(make_drill, make_request):
    drill = make_drill(num_pages=12, page_size=4, max_num_seqs=2)
    drill.add(make_request(1, 16, max_tokens=24), make_request(2, 16, max_tokens=24))
    answers = drill.drain()
    assert answers[1].num_preemptions == 0
    assert 1 <= answers[2].num_preemptions <= 2


def test_nobody_of_the_victims_tier_is_admitted_in_that_step(make_drill, make_request):
    drill = make_drill(num_pages=9, page_size=4, max_num_seqs=4)
    drill.add(make_request(1, 11, max_tokens=20), make_request(2, 11, max_tokens=20), make_request(3, 1, max_tokens=2))
    while drill.loop.stats().preemptions == 0:
        running = drill.loop.stats().running
        drill.step()
    assert drill.loop.stats().running == running - 1
    drill.drain()


def test_pool_of_exactly_one_request(make_drill, make_request):
    drill = make_drill(num_pages=6, page_size=4, max_num_seqs=4)
    # 12 + 9 tokens, of which 20 are computed: all five pages.
    drill.add(*(make_request(i, 12, max_tokens=9) for i in range(5)))
    answers = drill.drain()
    assert {answer.finish_reason for answer in answers.values()} == {"length"}


def test_prompt_larger_than_the_pool_is_a_row_error(make_drill, make_request):
    drill = make_drill(num_pages=6, page_size=4)
    drill.add(make_request(1, 21), make_request(2, 5))
    answers = drill.drain()
    assert answers[1].error == "the prompt has 21 tokens; the page pool holds 20 (5 pages of 4)"
    assert answers[2].finish_reason == "length"


def test_prompt_that_fills_the_pool_runs(make_drill, make_request):
    drill = make_drill(num_pages=6, page_size=4)
    drill.add(make_request(1, 20, max_tokens=1), make_request(2, 20, max_tokens=1))
    assert {answer.finish_reason for answer in drill.drain().values()} == {"length"}


def test_sequence_that_outgrows_the_pool_alone_is_a_row_error(make_drill, make_request):
    drill = make_drill(num_pages=6, page_size=4, max_num_seqs=3)
    drill.add(make_request(1, 12, max_tokens=10), make_request(2, 12, max_tokens=3), make_request(3, 4, max_tokens=3))
    answers = drill.drain()
    assert answers[1].finish_reason == "error"
    assert "needs pages for 21 tokens; the pool has 5 of 4 tokens each" in answers[1].error
    assert len(answers[1].token_ids) == 9
    assert answers[2].finish_reason == answers[3].finish_reason == "length"


def test_case_I055_one_taken_off_when_it_had_outgrown_the_pool_is_a_row_error(make_drill, make_request):
    # Its last token needs a page more than there are: it could never come back, and blocked its tier for ever.
    drill = make_drill(num_pages=6, page_size=4)
    drill.add(make_request(1, 18, max_tokens=10), make_request(2, 4, max_tokens=3))
    while drill.loop.table.sequences[0] is None or drill.loop.table.num_tokens[0] <= 20:
        drill.step()
    assert drill.preempt(1)
    answers = drill.drain()
    assert "needs pages for 21 tokens" in answers[1].error
    assert answers[2].error is None


def test_admission_does_not_count_pages_that_pinning_the_hit_takes(make_drill, make_request):
    prefix = tuple(range(100, 132))
    drill = make_drill(num_pages=12, page_size=4)
    drill.add(make_request(1, (*prefix, 1), max_tokens=1))
    drill.drain()  # eight pages cached, three free
    drill.add(make_request(2, 8, max_tokens=12))
    drill.step()
    # Needs eight cached pages and two new ones; without counting the pins, nine pages seem available.
    drill.add(make_request(3, (*prefix, *range(6)), max_tokens=4))
    drill.step()
    assert drill.loop.stats().waiting == 1
    drill.drain()


def test_recomputed_tokens_are_counted(make_drill, make_request):
    drill = make_drill(page_size=16, enable_prefix_caching=False)
    drill.add(make_request(1, 20, max_tokens=10))
    for _ in range(4):
        drill.step()
    drill.preempt(1)
    drill.drain()
    assert drill.loop.stats().recomputed_tokens == 23
    assert drill.loop.stats().computed_tokens == 29 + 23


def test_recomputed_tokens_of_a_recomputation_cut_short(make_drill, make_request):
    drill = make_drill(max_prefill_chunk=8, enable_prefix_caching=False)
    drill.add(make_request(1, 20, max_tokens=10))
    for _ in range(3):
        drill.step()
    drill.preempt(1)
    drill.step()
    drill.preempt(1)
    drill.drain()
    assert drill.loop.stats().recomputed_tokens == 8 + 20


def test_preempted_sequence_finds_its_own_pages(make_drill, make_request):
    drill = make_drill(page_size=4)
    drill.add(make_request(1, 20, max_tokens=10))
    for _ in range(6):
        drill.step()
    drill.preempt(1)
    drill.drain()
    assert drill.loop.stats().recomputed_tokens == 1  # 25 computed, six pages of four kept


def test_num_cached_tokens_is_the_hit_at_first_admission(make_drill, make_request):
    drill = make_drill(page_size=4)
    drill.add(make_request(1, 20, max_tokens=10))
    for _ in range(6):
        drill.step()
    drill.preempt(1)
    assert drill.drain()[1].num_cached_tokens == 0
