"""Preemption by swap: nothing is lost, nothing is computed twice that need not be, nothing is pinned."""

import pytest

from nightmill_worker.engine.options import PreemptionMode
from nightmill_worker.engine.preemption import PreemptionCost

SWAP, RECOMPUTE = PreemptionMode.SWAP, PreemptionMode.RECOMPUTE
PREFIX = tuple(range(300, 312))  # three pages of four

SAMPLINGS = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "top_k": 5},
    "penalties": {"presence_penalty": 0.5, "repetition_penalty": 1.2},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": tuple(range(0, 30))},
    "logprobs": {"logprobs": 2, "temperature": 1.0},
}


@pytest.fixture
def make_swapping(make_drill):
    def make(**options):
        defaults = {"page_size": 4, "num_pages": 64, "num_host_pages": 64, "preemption": SWAP}
        return make_drill(**{**defaults, **options})

    return make


def step(drill, count):
    for _ in range(count):
        drill.step()


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("at", range(1, 14))
def test_swapped_sequence_loses_nothing(make_swapping, make_request, name, at, caching):
    drill = make_swapping(vocab_size=40, max_prefill_chunk=8, enable_prefix_caching=caching)
    drill.add(make_request(1, (1, 2, 3, 4, 5, 6, 7, 8, 9, 10), max_tokens=12, **SAMPLINGS[name]))
    step(drill, at)
    was_running = drill.preempt(1, SWAP)
    answer = drill.drain()[1]
    stats = drill.loop.stats()
    assert answer.num_preemptions == stats.preemptions_swap == int(was_running)
    assert stats.recomputed_tokens == 0
    if name == "logprobs":
        assert [entry.token_id for entry in answer.logprobs] == list(answer.token_ids)


@pytest.mark.parametrize("mode", [SWAP, RECOMPUTE])
@pytest.mark.parametrize("at", range(1, 40))
def test_all_taken_off_at_every_step(make_swapping, make_request, mode, at):
    """Greedy and seeded, shared prefixes, chunks: the drill compares every answer."""
    drill = make_swapping(num_host_pages=200, num_pages=200, max_prefill_chunk=5, max_num_seqs=4, vocab_size=50)
    prompts = [(*(token % 50 for token in PREFIX), *range(1, 2 + 3 * i)) for i in range(6)]
    for i, prompt in enumerate(prompts):
        drill.add(make_request(i, prompt, max_tokens=10 + i, temperature=float(i % 2)))
    step(drill, at)
    for i in range(len(prompts)):
        drill.preempt(i, mode)
    drill.drain()


@pytest.mark.parametrize("mode", [SWAP, RECOMPUTE])
def test_all_taken_off_again_and_again(make_swapping, make_request, mode):
    """At every step there is, two steps apart."""
    drill = make_swapping(max_prefill_chunk=5, max_num_seqs=4, vocab_size=50)
    drill.add(*(make_request(i, (*(t % 50 for t in PREFIX), i), max_tokens=12) for i in range(4)))
    while drill.loop.has_work:
        step(drill, 2)
        for i in range(4):
            drill.preempt(i, mode)


def test_swapped_sequence_pins_no_page(make_swapping, make_request):
    drill = make_swapping()
    drill.add(make_request(1, 20, max_tokens=20))
    step(drill, 6)
    drill.preempt(1)
    stats = drill.loop.stats()
    assert (stats.pages_active, stats.pages_in_flight, stats.swapped) == (0, 0, 1)
    assert stats.host_pages_used == 7  # 25 tokens computed, the last page in part
    assert stats.host_pages_total == 64
    drill.drain()
    stats = drill.loop.stats()
    assert (stats.swapped, stats.host_pages_used, stats.recomputed_tokens) == (0, 0, 0)


def test_only_pages_without_another_holder_are_copied(make_swapping, make_request):
    drill = make_swapping()
    drill.add(make_request(1, (*PREFIX, 1, 2, 3, 4, 5), max_tokens=30))
    step(drill, 2)
    drill.add(make_request(2, (*PREFIX, 9, 9), max_tokens=30))
    step(drill, 2)
    shared = drill.loop.pool.num_active
    drill.preempt(2)
    assert drill.loop.stats().host_pages_used == 1  # 15 tokens, of which three pages are the other's too
    assert drill.loop.pool.num_active == shared - 1
    drill.drain()
    assert drill.loop.stats().recomputed_tokens == 0


def lose_the_prefix(drill, make_request):
    """Swap request 2, whose three prefix pages request 1 shares; end 1, and have them evicted."""
    drill.add(make_request(1, (*PREFIX, 1), max_tokens=30))
    step(drill, 2)
    drill.add(make_request(2, (*PREFIX, 8, 9, 10, 11, 12), max_tokens=10))
    step(drill, 4)
    drill.preempt(2, SWAP)
    drill.cancel(1)
    drill.loop.index.evict(drill.loop.pool.num_cached)  # somebody needed the pages


def test_lost_prefix_is_computed_again_and_only_that(make_swapping, make_request):
    drill = make_swapping(num_pages=13, max_num_seqs=2, max_prefill_chunk=5)
    lose_the_prefix(drill, make_request)
    drill.drain()
    stats = drill.loop.stats()
    assert stats.recomputed_tokens == len(PREFIX)
    assert stats.preemptions_swap >= 1


@pytest.mark.parametrize("mode", [SWAP, RECOMPUTE])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_taken_off_again_while_the_prefix_is_computed(make_swapping, make_request, mode, steps):
    drill = make_swapping(num_pages=40, max_num_seqs=2, max_prefill_chunk=5)
    lose_the_prefix(drill, make_request)
    step(drill, steps)
    assert drill.preempt(2, mode)
    drill.drain()


def test_what_the_index_still_has_is_not_copied_back(make_swapping, make_request, monkeypatch):
    drill = make_swapping()
    drill.add(make_request(1, 20, max_tokens=20))
    step(drill, 6)
    drill.preempt(1)
    copied = []
    swap_in = drill.runner.swap_in
    monkeypatch.setattr(
        drill.runner, "swap_in", lambda host, pages: (copied.extend(host.tolist()), swap_in(host, pages))
    )
    drill.drain()
    assert copied == [6]  # six whole pages are cached; the seventh was never published


def test_cancelled_while_swapped(make_swapping, make_request):
    drill = make_swapping()
    drill.add(make_request(1, 20, max_tokens=20), make_request(2, 9))
    step(drill, 4)
    drill.preempt(1)
    drill.cancel(1)
    assert drill.loop.stats().host_pages_used == 0
    assert len(drill.drain()[1].token_ids) == 4


def test_full_host_pool_means_recompute(make_swapping, make_request):
    drill = make_swapping(num_host_pages=7, enable_prefix_caching=False)
    drill.add(make_request(1, 20, max_tokens=20), make_request(2, 20, max_tokens=20))
    step(drill, 4)
    assert drill.preempt(1)
    assert drill.preempt(2)
    stats = drill.loop.stats()
    assert (stats.preemptions, stats.preemptions_swap, stats.swapped) == (2, 1, 1)
    drill.drain()
    assert drill.loop.stats().recomputed_tokens == 23


def test_nothing_computed_is_nothing_to_swap(make_swapping, make_request):
    drill = make_swapping(max_num_batched_tokens=8, max_num_seqs=2, max_prefill_chunk=8)
    drill.add(make_request(1, 20), make_request(2, 20))
    drill.step()
    drill.preempt(2)
    assert drill.loop.stats().preemptions_swap == 0
    drill.drain()


def test_without_host_pages_swap_is_recompute(make_drill, make_request):
    drill = make_drill(page_size=4, enable_prefix_caching=False)
    drill.add(make_request(1, 20))
    step(drill, 3)
    drill.preempt(1, SWAP)
    assert drill.loop.stats().preemptions_swap == 0
    drill.drain()
    assert drill.loop.stats().recomputed_tokens == 22


def test_memory_preemptions_swap_and_recompute_nothing(make_swapping, make_request):
    drill = make_swapping(num_pages=20, max_num_seqs=6, enable_prefix_caching=False)
    drill.add(*(make_request(i, 8, max_tokens=24) for i in range(6)))
    drill.drain()
    stats = drill.loop.stats()
    assert stats.preemptions == stats.preemptions_memory == stats.preemptions_swap > 0
    assert stats.recomputed_tokens == 0


def test_swap_goes_ahead_of_need(make_swapping, make_request):
    """The step that runs out of pages never comes: the one before it has made room."""
    short = []
    drill = make_swapping(num_pages=20, max_num_seqs=6, enable_prefix_caching=False)
    grow = drill.loop.scheduler._grow
    drill.loop.scheduler._grow = lambda decodes: short.append(grow(decodes)) or short[-1]
    drill.add(*(make_request(i, 8, max_tokens=24) for i in range(6)))
    drill.drain()
    assert drill.loop.stats().preemptions_memory > 0
    assert sum(short) < drill.loop.stats().preemptions_memory


def test_rows_that_end_are_not_preempted_for(make_swapping, make_request):
    """Two rows fill the pool to the last page exactly when the first of them ends."""
    drill = make_swapping(num_pages=9, max_num_seqs=2, enable_prefix_caching=False)
    drill.add(make_request(1, 12, max_tokens=5), make_request(2, 12, max_tokens=9))
    drill.drain()
    assert drill.loop.stats().preemptions == 0


def test_cost_prefers_swap_where_copies_are_faster():
    cost = PreemptionCost(bytes_per_token=1000, bytes_per_s=1e6)  # 2 ms a token, out and in
    assert cost.prefers_swap(16, 10)  # nothing is known of prefill yet
    cost.observe(num_tokens=100, num_sequences=1, seconds=1.0)
    assert cost.prefers_swap(16, 10)  # 32 ms against 100
    assert not cost.prefers_swap(16, 3)  # a page with three tokens in it
    for _ in range(100):
        cost.observe(num_tokens=1000, num_sequences=1, seconds=1.0)
    assert not cost.prefers_swap(16, 16)


def test_cost_learns_from_prefill_only():
    cost = PreemptionCost(bytes_per_token=1000, bytes_per_s=1e6)
    cost.observe(num_tokens=64, num_sequences=64, seconds=100.0)
    assert cost._recompute_s_per_token is None


def test_auto_follows_the_cost(make_swapping, make_request):
    drill = make_swapping(preemption=PreemptionMode.AUTO, enable_prefix_caching=False)
    drill.add(make_request(1, 20), make_request(2, 20))
    step(drill, 3)
    drill.loop.preemption_cost._recompute_s_per_token = 1e-12
    drill.preempt(1)
    drill.loop.preemption_cost._recompute_s_per_token = 1.0
    drill.preempt(2)
    assert drill.loop.swap.saved(drill.loop._live[1]) is None
    assert drill.loop.swap.saved(drill.loop._live[2]) is not None
    drill.drain()
