"""Drawing on a device against the sampler: the same tokens, logprobs and failures, with one copy there and one back."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.model.reference_sampler import Row, batch_of
from tests.unit.model.test_sampler import GREEDY, LARGE, V, random_logits, rows

from nightmill_kernels.backend import use_triton
from nightmill_worker.engine.step import SampleBatch, StepOutput
from nightmill_worker.model.device import Device
from nightmill_worker.model.device_sampler import DeviceSampler
from nightmill_worker.model.sampler import sample
from nightmill_worker.model.staging import StagingBuffer


def run(logits: torch.Tensor, batch: SampleBatch) -> StepOutput:
    """As the runner does it; what the batch's arrays and the logits were is gone before the end."""
    sampler = DeviceSampler(logits.shape[1])
    staging = StagingBuffer(Device(), 1 << 20)
    staged = sampler.stage(batch, staging.put)
    wipe(batch)
    staging.flush()
    padded = torch.cat((logits, torch.full_like(logits[:2], math.nan)))
    drawn = sampler.draw(padded, staged)
    assert drawn.dtype == torch.int32
    padded.fill_(math.nan)
    host = drawn.numpy().copy()
    output = sampler.finish(host, staged)
    host.fill(-7)
    return output


def wipe(batch: SampleBatch) -> None:
    """The engine's buffers may change as soon as `stage` returns."""
    for name in ("temperature", "top_k", "top_p", "min_p", "seed", "position", "num_logprobs", "presence_penalty"):
        getattr(batch, name).fill(3)
    for tokens, _ in batch.history.values():
        tokens.fill(1)
    for ids in batch.banned.values():
        ids.fill(1)


def assert_equal(found: StepOutput, expected: StepOutput) -> None:
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert found.logprobs == expected.logprobs
    assert [*found.failed] == [*expected.failed]
    for row, reason in expected.failed.items():
        assert ("banned" in found.failed[row]) == ("banned" in reason)
        assert ("not finite" in found.failed[row]) == ("not finite" in reason)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(rows, min_size=1, max_size=6),
    seed=st.integers(0, 99),
    vocab_size=st.sampled_from([V, LARGE]),
    bad=st.sampled_from([None, math.nan, math.inf]),
)
def test_equals_the_sampler(rows: list[Row], seed: int, vocab_size: int, bad: float | None) -> None:
    logits = random_logits(len(rows), seed=seed, vocab_size=vocab_size)
    if bad is not None:
        logits[seed % len(rows), seed % vocab_size] = bad
    assert_equal(run(logits, batch_of(rows)), sample(logits.clone(), batch_of(rows)))


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(rows, min_size=2, max_size=6), seed=st.integers(0, 99))
def test_a_mixed_batch_equals_its_rows_alone(rows: list[Row], seed: int) -> None:
    logits = random_logits(len(rows), seed=seed)
    together = run(logits, batch_of(rows))
    for i, row in enumerate(rows):
        alone = run(logits[i : i + 1], batch_of([row]))
        assert alone.tokens[0] == together.tokens[i]
        found, expected = together.logprobs.get(i), alone.logprobs.get(0)
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            assert found.logprob == expected.logprob
            assert [value for _, value in found.top] == [value for _, value in expected.top]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_penalties_are_computed_in_float32(dtype: torch.dtype) -> None:
    logits = random_logits(12).to(dtype)
    penalised = Row(presence=0.3, frequency=0.1, repetition=1.3, num_logprobs=V)  # whose logprobs show every bit
    kinds = [penalised, Row(repetition=0.7), Row(num_logprobs=4), GREEDY]
    history = (1, 2, *[2] * 3, *[3] * 7, *range(4, 40), *range(10, 30), *range(20, 25))
    rows = [replace(kinds[i % 4], seed=i, history=history, prompt_length=2, frequency=0.1 * i) for i in range(12)]
    assert_equal(run(logits, batch_of(rows)), sample(logits.clone(), batch_of(rows)))


def test_a_plain_step_brings_back_tokens_alone() -> None:
    sampler, batch = DeviceSampler(V), batch_of([Row(), GREEDY])
    staged = sampler.stage(batch, lambda array: torch.from_numpy(array.copy()))
    assert sampler.draw(random_logits(2), staged).shape == (2,)
    assert not staged.has_filters


def test_greedy_rows_put_nothing() -> None:
    def refuse(array: object) -> torch.Tensor:
        raise AssertionError(f"{array} was put")

    staged = DeviceSampler(V).stage(batch_of([GREEDY, GREEDY]), refuse)
    assert staged.rows is None
    assert DeviceSampler(V).draw(random_logits(2), staged).tolist() == random_logits(2).argmax(-1).tolist()


@pytest.mark.parametrize("banned", [(), tuple(range(V))])
def test_why_a_row_failed(banned: tuple[int, ...]) -> None:
    rows = [replace(GREEDY, banned=banned), replace(GREEDY, banned=(1,)), Row(num_logprobs=2)]
    logits = random_logits(3)
    logits[1] = math.nan
    output = run(logits, batch_of(rows))
    assert "not finite" in output.failed[1]
    assert (0 in output.failed) == bool(banned)
    assert not banned or "banned" in output.failed[0]
    assert [*output.logprobs] == [2]


def test_more_logprobs_than_tokens() -> None:
    logits = random_logits(1)
    output = run(logits, batch_of([Row(num_logprobs=200)]))
    assert len(output.logprobs[0].top) == V
    assert math.isclose(sum(math.exp(value) for _, value in output.logprobs[0].top), 1, abs_tol=1e-5)


def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    kinds = [
        GREEDY,
        Row(seed=2**64 - 1, position=2**33),
        Row(top_k=4, top_p=0.8, num_logprobs=2),
        Row(min_p=0.2, repetition=1.4, presence=0.5, history=(3, 4, 4), prompt_length=1),
        replace(GREEDY, banned=tuple(range(V))),
    ]
    logits = random_logits(5)
    expected = sample(logits.clone(), batch_of(kinds))
    with use_triton():
        assert_equal(run(logits, batch_of(kinds)), expected)
        greedy = batch_of([GREEDY] * 5)
        assert_equal(run(logits, greedy), sample(logits.clone(), batch_of([GREEDY] * 5)))


def test_a_row_that_is_drawn_again_is_drawn_alike() -> None:
    """What recompute and retries rest on: nothing but the row's own parameters goes into a draw."""
    logits = random_logits(1).expand(7, -1)
    assert len(set(run(logits, batch_of([Row(seed=9, top_p=0.9)] * 7)).tokens.tolist())) == 1
    assert np.unique(run(torch.zeros(7, V), batch_of([Row(seed=i) for i in range(7)])).tokens).size > 1
