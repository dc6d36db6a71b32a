"""Requests through the real engine over a runner that stays open: greedy and seeded rows, audited after every step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nightmill.sampling import SamplingParams
from nightmill.states import Tier
from nightmill_worker.engine.audit import audit_loop
from nightmill_worker.engine.loop import EngineLoop
from nightmill_worker.engine.options import AdmissionRule, EvictionRule, LoopOptions, PreemptionMode, QueueOrder
from nightmill_worker.engine.request import Finished, Request
from nightmill_worker.engine.stats import EngineStats
from nightmill_worker.engine.step import Runner

SEEDED = (
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=1.2, top_k=20),
    SamplingParams(temperature=1.0, min_p=0.05),
    SamplingParams(temperature=0.7, presence_penalty=0.5, frequency_penalty=0.8),
    SamplingParams(temperature=0.9, repetition_penalty=1.3, top_p=0.95, top_k=50),
    SamplingParams(temperature=1.5, top_k=300, top_p=0.8, min_p=0.01),
    SamplingParams(repetition_penalty=1.2, presence_penalty=0.3),  # greedy, but with a history
)
"""Every way to draw; row r of the seeded rows takes the (r mod 8)-th."""

POLICIES = {
    "planned": LoopOptions(order=QueueOrder.PLANNED, admission=AdmissionRule.GROWTH, eviction=EvictionRule.FUTURE),
    "arrival": LoopOptions(order=QueueOrder.ARRIVAL, admission=AdmissionRule.GREEDY, eviction=EvictionRule.LRU),
}
"""What the engine does when nobody says otherwise, and the simplest there is."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What a run gave."""

    rows: tuple[Finished, ...]  # in the order of the requests
    stats: EngineStats

    @property
    def tokens(self) -> list[list[int]]:
        """Generated tokens of each row."""
        return [list(row.token_ids) for row in self.rows]


def requests_of(
    prompts: Sequence[tuple[int, ...]], samplings: Sequence[SamplingParams], *, max_tokens: int
) -> list[Request]:
    """One request for each prompt; row r draws as the (r mod n)-th sampling says, EOS ignored."""
    chosen = [samplings[r % len(samplings)] for r in range(len(prompts))]
    return [
        Request(
            request_id=r,
            job_id="parity",
            tier=Tier.NORMAL,
            prompt=prompt,
            sampling=SamplingParams(
                **{name: getattr(s, name) for name in _DRAWING}, max_tokens=max_tokens, ignore_eos=True
            ),
            seed=0x9E3779B97F4A7C15 * (r + 1) % 2**64,
        )
        for r, (prompt, s) in enumerate(zip(prompts, chosen, strict=True))
    ]


_DRAWING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logprobs",
)


def answer(
    runner: Runner,
    requests: Sequence[Request],
    options: LoopOptions,
    after_step: Callable[[EngineLoop], None] = lambda loop: None,
) -> Answers:
    """Run all requests to their end. The runner stays open, with its pages as they are: nothing may read old ones."""
    loop = EngineLoop(runner, options)
    for request in requests:
        loop.add(request)
    ended: list[Finished] = []
    while loop.has_work:
        ended += loop.step()
        audit_loop(loop)
        after_step(loop)
    assert not [f.error for f in ended if f.error is not None]
    by_id = {f.request_id: f for f in ended}
    return Answers(tuple(by_id[request.request_id] for request in requests), loop.stats())


def answer_preempted(
    runner: Runner,
    requests: Sequence[Request],
    options: LoopOptions,
    mode: PreemptionMode,
    is_due: Callable[[int], bool],
) -> Answers:
    """As `answer`, everything that runs taken off after each step that is due, counted from 1."""

    def take_off(loop: EngineLoop) -> None:
        if is_due(loop.counters.steps):
            for request in requests:
                loop.preempt(request.request_id, mode)

    answers = answer(runner, requests, options, take_off)
    assert answers.stats.preemptions > 0, "nothing ran in the steps that were due"
    assert (answers.stats.preemptions_swap > 0) == (mode is PreemptionMode.SWAP)
    assert (answers.stats.swapped, answers.stats.host_pages_used) == (0, 0)
    return answers
