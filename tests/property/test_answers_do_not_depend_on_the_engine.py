"""I11 and I12: the same requests under any page size, chunk size, order, cache, batch size and policy, same tokens.

The drill compares each answer with the oracle, which knows only the request.
"""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from nightmill.sampling import SamplingParams
from nightmill.states import Tier
from nightmill_worker.engine.drill import Drill
from nightmill_worker.engine.fake import FakeRunnerConfig
from nightmill_worker.engine.options import LoopOptions, PreemptionMode
from nightmill_worker.engine.request import Request

VOCAB = 500


def requests(rng: Any, count: int) -> list[Request]:
    prefix = [rng.randrange(VOCAB) for _ in range(64)]
    return [
        Request(
            request_id=i,
            job_id="job",
            tier=rng.choice(list(Tier)),
            prompt=tuple(prefix[: rng.choice([0, 15, 16, 17, 48, 64])] + [rng.randrange(VOCAB)] * rng.randint(1, 9)),
            sampling=SamplingParams(
                temperature=rng.choice([0.0, 1.0]), max_tokens=rng.randint(1, 40), stop_token_ids=(3, 4, 5)
            ),
            seed=rng.getrandbits(64),
        )
        for i in range(count)
    ]


@given(
    rng=st.randoms(use_true_random=False),
    page_size=st.sampled_from([1, 4, 16, 32, 64]),
    chunk=st.sampled_from([None, "1", "page-1", "page", "page+1"]),
    max_num_seqs=st.sampled_from([1, 3, 8, 64]),
    caching=st.booleans(),
    policy=st.sampled_from(["continuous", "continuous", "static"]),
    tokens=st.sampled_from([160, 320, 4000]),
)
def test_same_tokens_whatever_runs_them(rng, page_size, chunk, max_num_seqs, caching, policy, tokens):
    chunks = {"1": 1, "page-1": max(1, page_size - 1), "page": page_size, "page+1": page_size + 1, None: None}
    batch = requests(rng, 12)
    rng.shuffle(batch)
    drill = Drill(
        FakeRunnerConfig(num_pages=1 + tokens // page_size, page_size=page_size, vocab_size=VOCAB),
        LoopOptions(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + rng.choice([0, 7, 200]),
            max_model_len=128,
            enable_prefix_caching=caching,
            max_prefill_chunk=chunks[chunk],
            policy=policy,
        ),
    )
    drill.add(*batch)
    answers = drill.drain()
    assert all(answer.error is None for answer in answers.values())


@settings(max_examples=settings.default.max_examples // 3)
@given(
    rng=st.randoms(use_true_random=False),
    page_size=st.sampled_from([4, 16]),
    host_tokens=st.sampled_from([0, 100, 999]),
)
def test_same_tokens_under_any_preemption_schedule(rng, page_size, host_tokens):
    drill = Drill(
        FakeRunnerConfig(
            num_pages=1 + 2000 // page_size,
            page_size=page_size,
            vocab_size=VOCAB,
            num_host_pages=host_tokens // page_size,
        ),
        LoopOptions(max_num_seqs=5, max_num_batched_tokens=40, max_model_len=128, max_prefill_chunk=17),
    )
    drill.add(*requests(rng, 8))
    for _ in range(150):
        drill.step()
        if rng.random() < 0.5:
            drill.preempt(rng.randrange(8), rng.choice([PreemptionMode.SWAP, PreemptionMode.RECOMPUTE]))
    drill.drain()
