"""A real decoder in float32: preempted at any step, by swap or by recompute, it answers as if it had not been.

Swapped pages come back bit for bit. Recomputed ones may differ by rounding, because a chunk multiplies other matrix
shapes than a decode: greedy answers are judged by the comparator, and seeded ones must be equal.
"""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.parity.tiny_models import save_tiny

from nightmill.records import EngineOptions, ModelSpec
from nightmill.sampling import SamplingParams
from nightmill.states import Tier
from nightmill_worker.bench.comparator import ReferenceStep, compare_greedy
from nightmill_worker.engine.audit import audit_loop
from nightmill_worker.engine.loop import EngineLoop
from nightmill_worker.engine.options import LoopOptions, PreemptionMode
from nightmill_worker.engine.request import Finished, Request
from nightmill_worker.model.runner import ModelRunner, ModelRunnerConfig

SWAP, RECOMPUTE = PreemptionMode.SWAP, PreemptionMode.RECOMPUTE
PREFIX = tuple(range(3, 12))  # two pages of four and a part
PROMPTS = ((*PREFIX, 40, 41), (*PREFIX, 50), (20, 21, 22), (*PREFIX, 40, 41, 42, 43, 44, 45))
MAX_TOKENS = 9
NUM_STEPS = {True: 19, False: 20}  # of an undisturbed run, with the prefix index and without; checked below
EVERY_STEP = [(caching, at) for caching, steps in NUM_STEPS.items() for at in range(1, steps)]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    directory: Path = tmp_path_factory.mktemp("llama")
    save_tiny("llama", directory)
    options = EngineOptions(page_size=4, pool_bytes=1 << 20, swap_bytes=1 << 20, num_threads=1)
    spec = ModelSpec(model="tiny", dtype="float32", max_model_len=64)
    return ModelRunnerConfig(model_dir=directory, spec=spec, options=options).build()


def engine(runner: ModelRunner, *, caching: bool, seeded: bool) -> EngineLoop:
    loop = EngineLoop(
        runner,
        LoopOptions(
            max_num_seqs=3,
            max_num_batched_tokens=16,
            max_prefill_chunk=5,
            max_model_len=64,
            enable_prefix_caching=caching,
        ),
    )
    for i, prompt in enumerate(PROMPTS):
        sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0 if seeded else 0.0, logprobs=5)
        loop.add(Request(request_id=i, job_id="j", tier=Tier.NORMAL, prompt=prompt, sampling=sampling, seed=77 + i))
    return loop


def drain(loop: EngineLoop, after_step: Callable[[int], None] = lambda step: None) -> list[Finished]:
    ended: list[Finished] = []
    while loop.has_work:
        ended += loop.step()
        audit_loop(loop)
        after_step(loop.counters.steps)
    return sorted(ended, key=lambda finished: finished.request_id)


@functools.cache
def undisturbed(runner: ModelRunner, *, caching: bool, seeded: bool) -> tuple[Finished, ...]:
    return tuple(drain(engine(runner, caching=caching, seeded=seeded)))


@pytest.mark.parametrize("caching", [True, False])
def test_number_of_steps(runner: ModelRunner, caching: bool) -> None:
    loop = engine(runner, caching=caching, seeded=False)
    drain(loop)
    assert loop.counters.steps == NUM_STEPS[caching]


def preempted(runner: ModelRunner, mode: PreemptionMode, is_due: Callable[[int], bool], **kind: bool) -> list[Finished]:
    loop = engine(runner, **kind)

    def preempt_all(step: int) -> None:
        if is_due(step):
            for i in range(len(PROMPTS)):
                loop.preempt(i, mode)

    answers = drain(loop, preempt_all)
    stats = loop.stats()
    assert stats.preemptions > 0
    assert (stats.preemptions_swap > 0) == (mode is SWAP)
    assert (stats.swapped, stats.host_pages_used) == (0, 0)
    return answers


def steps_of(answer: Finished) -> list[ReferenceStep]:
    """Log probabilities are logits but for a constant, so gaps between them are gaps between logits."""
    assert answer.logprobs is not None
    return [ReferenceStep(token.token_id, dict(token.top), max_abs_logit=0.0) for token in answer.logprobs]


@pytest.mark.parametrize("mode", [SWAP, RECOMPUTE])
@pytest.mark.parametrize(("caching", "at"), EVERY_STEP)
def test_greedy_answers(runner: ModelRunner, at: int, mode: PreemptionMode, caching: bool) -> None:
    expected = undisturbed(runner, caching=caching, seeded=False)
    answers = preempted(runner, mode, lambda step: step == at, caching=caching, seeded=False)
    comparison = compare_greedy(
        [steps_of(answer) for answer in expected], [answer.token_ids for answer in answers], dtype="float32"
    )
    assert not comparison.failures, str(comparison)
    assert comparison.num_identical == len(PROMPTS)


@pytest.mark.parametrize("mode", [SWAP, RECOMPUTE])
@pytest.mark.parametrize(("caching", "at"), EVERY_STEP)
def test_seeded_answers(runner: ModelRunner, at: int, mode: PreemptionMode, caching: bool) -> None:
    expected = undisturbed(runner, caching=caching, seeded=True)
    answers = preempted(runner, mode, lambda step: step == at, caching=caching, seeded=True)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]


@pytest.mark.parametrize("mode", [SWAP, RECOMPUTE])
def test_taken_off_after_every_second_step(runner: ModelRunner, mode: PreemptionMode) -> None:
    answers = preempted(runner, mode, lambda step: step % 2 == 0, caching=True, seeded=False)
    expected = undisturbed(runner, caching=True, seeded=False)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]


@pytest.mark.parametrize("caching", [True, False])
def test_restored_pages_are_bit_for_bit(runner: ModelRunner, caching: bool) -> None:
    planes = runner._swap_pool()._pool
    for at in range(1, NUM_STEPS[caching]):
        loop = engine(runner, caching=caching, seeded=False)
        for _ in range(at):
            loop.step()
        table = loop.table
        before = {}
        for row in table.rows().tolist():
            pages = table.page_table[row, : -(-int(table.num_computed[row]) // 4)].copy()
            before[table.sequence(row).request.request_id] = (int(table.num_computed[row]), planes[:, pages].clone())
        for i in before:
            loop.preempt(i, SWAP)
        if loop.index is not None:
            loop.index.evict(loop.pool.num_cached)  # nothing is found there: all has to come from the host
        planes.fill_(float("nan"))  # the pool as a whole is somebody else's by now
        planes[:, 0] = 0
        loop.scheduler.schedule()
        compared = 0
        for row in table.rows().tolist():
            key = table.sequence(row).request.request_id
            if key not in before:
                continue
            num_computed, content = before[key]
            first = int(table.hole_end[row]) // 4  # shared pages that were given up are to be computed again
            assert int(table.hole_to[row] or table.num_computed[row]) == num_computed
            pages = table.page_table[row, first : content.shape[1]]
            restored = planes[:, pages].view(torch.uint8)
            assert torch.equal(restored, content[:, first:].contiguous().view(torch.uint8))
            compared += len(pages)
        assert compared > 0
        planes.zero_()
