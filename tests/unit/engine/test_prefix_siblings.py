"""Rows whose prefix another row is computing wait for it: the prefix is computed once, whatever the step's limits.

The shape is the benchmark's W1: 384 shared tokens, 16–96 own, 8–64 generated. The drill also checks every answer.
"""

import random
from itertools import islice

import pytest

from nightmill.sampling import SamplingParams
from nightmill.states import Tier
from nightmill_worker.engine.drill import Drill
from nightmill_worker.engine.request import Request

SHARED = 384
ROWS = 48


def w1_like(num_prefixes: int, seed: int = 1) -> list[Request]:
    """Rows in random order; own parts share nothing, not even their first token."""
    rng = random.Random(seed)
    prefixes = [tuple(rng.randrange(500) for _ in range(SHARED)) for _ in range(num_prefixes)]
    return [
        Request(
            request_id=i,
            job_id="job",
            tier=Tier.NORMAL,
            prompt=(*prefixes[rng.randrange(num_prefixes)], 500 + i, *rng.choices(range(500), k=rng.randint(15, 95))),
            sampling=SamplingParams(max_tokens=rng.randint(8, 64), ignore_eos=True),
            seed=i,
        )
        for i in range(ROWS)
    ]


def least_tokens(requests: list[Request]) -> int:
    """Each prefix once, each row's own tokens, and its answer but for the last token, which is never computed."""
    prefixes = {request.prompt[:SHARED] for request in requests}
    own = sum(len(request.prompt) - SHARED + request.sampling.max_tokens - 1 for request in requests)
    return SHARED * len(prefixes) + own


@pytest.mark.parametrize("num_prefixes", [1, 3, 11])
@pytest.mark.parametrize("budget", [100, 512, 2048])
def test_each_prefix_is_computed_once(make_drill, num_prefixes: int, budget: int) -> None:
    drill: Drill = make_drill(
        num_pages=2048, max_num_seqs=16, max_num_batched_tokens=budget, max_model_len=1024, admission="growth"
    )
    requests = w1_like(num_prefixes)
    drill.add(*requests)
    drill.drain()
    assert drill.loop.stats().computed_tokens == least_tokens(requests)


@pytest.mark.parametrize("chunk", [15, 16, 17, 100, 383, 384, 385])
def test_chunk_borders_make_no_difference(make_drill, chunk: int) -> None:
    drill: Drill = make_drill(
        num_pages=2048, max_num_seqs=16, max_num_batched_tokens=512, max_prefill_chunk=chunk, max_model_len=1024
    )
    requests = w1_like(2)
    drill.add(*requests)
    drill.drain()
    assert drill.loop.stats().computed_tokens == least_tokens(requests)


@pytest.mark.parametrize("at_once", [1, 2, 7])
def test_rows_that_come_while_it_is_computed_wait_too(make_drill, at_once: int) -> None:
    drill: Drill = make_drill(num_pages=2048, max_num_seqs=16, max_num_batched_tokens=128, max_model_len=1024)
    requests = w1_like(3)
    coming = iter(requests)
    drill.add(*islice(coming, at_once))
    while drill.loop.has_work:
        drill.step()
        drill.add(*islice(coming, at_once))
    assert drill.loop.stats().computed_tokens == least_tokens(requests)


def test_rows_of_another_prefix_do_not_wait(make_drill) -> None:
    drill: Drill = make_drill(num_pages=2048, max_num_seqs=ROWS, max_num_batched_tokens=1024, max_model_len=1024)
    drill.add(*w1_like(2))
    drill.step()
    stats = drill.loop.stats()
    assert (stats.running, stats.computed_tokens > 2 * SHARED) == (2, True)
