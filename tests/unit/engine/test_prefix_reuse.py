"""Prefix reuse in the loop: what is computed, what is found, what is never shared."""

import pytest

from nightmill.states import Tier

PREFIX = tuple(range(100, 164))  # four pages of 16


def test_whole_prompt_cached_still_computes_its_last_token(make_drill, make_request):
    drill = make_drill()
    prompt = PREFIX[:32]
    drill.add(make_request(1, prompt))
    drill.drain()
    drill.add(make_request(2, prompt))
    assert drill.drain()[2].num_cached_tokens == 16


@pytest.mark.parametrize(("length", "cached"), [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (64, 48)])
def test_hit_is_full_pages_short_of_the_last_token(make_drill, make_request, length, cached):
    drill = make_drill()
    drill.add(make_request(1, PREFIX))
    drill.drain()
    drill.add(make_request(2, PREFIX[:length]))
    assert drill.drain()[2].num_cached_tokens == cached


def test_partial_page_is_not_shared(make_drill, make_request):
    drill = make_drill()
    drill.add(make_request(1, (*PREFIX[:24], 7, 8, 9)), make_request(2, (*PREFIX[:24], 1, 2, 3)))
    drill.drain()
    drill.add(make_request(3, (*PREFIX[:24], 7, 8, 1)))
    assert drill.drain()[3].num_cached_tokens == 16


def test_siblings_wait_for_a_prefix_that_is_being_computed(make_drill, make_request):
    drill = make_drill(max_prefill_chunk=32)
    drill.add(*(make_request(i, (*PREFIX, i, i)) for i in range(6)))
    drill.step()
    assert drill.loop.stats().parked == 5
    answers = drill.drain()
    assert [answers[i].num_cached_tokens for i in range(6)] == [0, 64, 64, 64, 64, 64]
    stats = drill.loop.stats()
    assert stats.computed_tokens == 64 + 6 * 2 + 6 * 7
    assert (stats.prompt_tokens, stats.cached_tokens) == (6 * 66, 5 * 64)


def test_others_pass_siblings_that_wait(make_drill, make_request):
    drill = make_drill()
    drill.add(make_request(1, (*PREFIX, 1)), make_request(2, (*PREFIX, 2)), make_request(3, 20))
    drill.step()
    stats = drill.loop.stats()
    assert (stats.running, stats.parked) == (2, 1)


def test_siblings_go_on_when_the_writer_is_cancelled(make_drill, make_request):
    drill = make_drill(max_prefill_chunk=16, max_num_seqs=4)
    drill.add(*(make_request(i, (*PREFIX, i)) for i in range(4)))
    drill.step()
    drill.cancel(0)
    answers = drill.drain()
    assert answers[1].num_cached_tokens == 16  # what the writer had finished, and no more
    assert answers[2].num_cached_tokens == answers[3].num_cached_tokens == 64


def test_siblings_go_on_when_the_writer_is_preempted(make_drill, make_request):
    drill = make_drill(max_prefill_chunk=16, max_num_seqs=4)
    drill.add(*(make_request(i, (*PREFIX, i)) for i in range(4)))
    drill.step()
    assert drill.preempt(0)
    drill.drain()


def test_parked_sibling_can_be_cancelled(make_drill, make_request):
    drill = make_drill(max_prefill_chunk=16, max_num_seqs=4)
    drill.add(*(make_request(i, (*PREFIX, i)) for i in range(3)))
    drill.step()
    drill.cancel(2)
    assert drill.loop.stats().parked == 1
    drill.drain()


def test_urgent_sibling_does_not_wait_for_a_lower_tier(make_drill, make_request):
    drill = make_drill(max_prefill_chunk=16, max_num_seqs=4)
    drill.add(make_request(1, (*PREFIX, 1), tier=Tier.LOW))
    drill.step()
    drill.add(make_request(2, (*PREFIX, 2), tier=Tier.HIGH))
    drill.drain()
    assert drill.answers[2].num_cached_tokens == 16
    # Both computed pages 2 to 4; the second to finish took the first one's.
    assert drill.loop.stats().pages_cached == drill.loop.pool.num_pages(len(PREFIX))


def test_not_more_are_parked_than_could_run(make_drill, make_request):
    drill = make_drill(max_prefill_chunk=16, max_num_seqs=4)
    drill.add(*(make_request(i, (*PREFIX, i)) for i in range(50)))
    drill.step()
    assert drill.loop.stats().parked == 4
    drill.drain()


def test_generated_pages_are_found_by_the_next_turn(make_drill, make_request):
    drill = make_drill()
    drill.add(make_request(1, PREFIX[:20], max_tokens=30))
    first = drill.drain()[1]
    drill.add(make_request(2, (*PREFIX[:20], *first.token_ids, 5, 6)))
    # 20 + 30 tokens, of which the last was never computed: 49, three pages.
    assert drill.drain()[2].num_cached_tokens == 48


def test_without_the_index_nothing_is_shared(make_drill, make_request):
    drill = make_drill(enable_prefix_caching=False)
    drill.add(*(make_request(i, (*PREFIX, i)) for i in range(3)))
    drill.step()
    assert drill.loop.stats().running == 3
    answers = drill.drain()
    assert [answers[i].num_cached_tokens for i in range(3)] == [0, 0, 0]
    assert drill.loop.stats().pages_free == drill.loop.stats().pages_total


def test_evicted_prefix_is_computed_again(make_drill, make_request):
    drill = make_drill(num_pages=7)
    drill.add(make_request(1, (*PREFIX, 1), max_tokens=4))
    drill.drain()
    drill.add(make_request(2, 90, max_tokens=4))
    drill.drain()
    drill.add(make_request(3, (*PREFIX, 1), max_tokens=4))
    assert drill.drain()[3].num_cached_tokens == 0
    assert drill.loop.stats().evictions > 0


def test_index_forgets_what_nobody_refers_to(make_drill, make_request):
    drill = make_drill()
    drill.add(*(make_request(i, 40 + i) for i in range(10)))
    drill.step()
    drill.cancel(*range(5))
    drill.drain()
    index = drill.loop.index
    index.evict(drill.loop.pool.num_cached)
    assert len(index) == 0


def test_failed_row_leaves_nothing_in_the_index(make_drill, make_request):
    drill = make_drill(fail_token=999, max_num_batched_tokens=24)
    drill.add(make_request(1, (*PREFIX, 999)), make_request(2, 30))
    answers = drill.drain()
    assert answers[1].finish_reason == "error"
    assert "fail token 999" in answers[1].error
    assert answers[1].token_ids == ()
    assert answers[2].finish_reason == "length"
    drill.add(make_request(3, (*PREFIX, 5)))
    assert drill.drain()[3].num_cached_tokens == 0


def test_failed_row_does_not_take_pages_that_others_hold(make_drill, make_request):
    drill = make_drill(fail_token=999)
    drill.add(make_request(1, (*PREFIX, 1), max_tokens=20))
    drill.step()
    drill.add(make_request(2, (*PREFIX, 999)))
    drill.step()
    assert drill.answers[2].finish_reason == "error"
    drill.add(make_request(3, (*PREFIX, 3)))
    assert drill.drain()[3].num_cached_tokens == 64
