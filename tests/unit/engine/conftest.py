"""Shared by the engine's unit tests: requests and drills in one line."""

from collections.abc import Callable
from typing import Any

import pytest

from nightmill.sampling import SamplingParams
from nightmill.states import Tier
from nightmill_worker.engine.drill import Drill
from nightmill_worker.engine.fake import FakeRunnerConfig
from nightmill_worker.engine.options import LoopOptions
from nightmill_worker.engine.request import Request


def _letters(token_ids: Any) -> str:
    return "".join(chr(ord("a") + token % 26) for token in token_ids)


@pytest.fixture
def make_request() -> Callable[..., Request]:
    """`make_request(id, prompt or its length, max_tokens=…, **sampling)`; prompts made from lengths share nothing."""

    def make(
        request_id: int,
        prompt: tuple[int, ...] | int,
        *,
        tier: Tier = Tier.NORMAL,
        job_id: str = "job",
        eos: tuple[int, ...] = (),
        seed: int | None = None,
        **sampling: Any,
    ) -> Request:
        if isinstance(prompt, int):
            prompt = tuple((request_id * 7919 + i * 31) % 1000 for i in range(prompt))
        return Request(
            request_id=request_id,
            job_id=job_id,
            tier=tier,
            prompt=prompt,
            sampling=SamplingParams(**{"max_tokens": 8, **sampling}),
            seed=request_id * 1_000_003 if seed is None else seed,
            eos_token_ids=eos,
        )

    return make


@pytest.fixture
def make_drill() -> Callable[..., Drill]:
    """`make_drill(num_pages=…, page_size=…, **LoopOptions)`: a self-checking engine whose tokens spell letters."""

    def make(
        *,
        num_pages: int = 256,
        page_size: int = 16,
        vocab_size: int = 1000,
        fail_token: int | None = None,
        num_host_pages: int = 0,
        **options: Any,
    ) -> Drill:
        config = FakeRunnerConfig(
            num_pages=num_pages,
            page_size=page_size,
            vocab_size=vocab_size,
            fail_token=fail_token,
            num_host_pages=num_host_pages,
        )
        # Greedy: most of these tests want the pool to run out, which the growth gate is there to prevent.
        limits = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 512}
        options = {"admission": "greedy", **limits, **options}
        return Drill(config, LoopOptions(**options), _letters)

    return make
