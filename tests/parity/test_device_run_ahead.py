"""I20 on a real decoder: steps that overlap on a device that is late give the tokens of one step after the other."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.contract.runner_subjects import PAGE_SIZE, VOCAB_SIZE, device_runner, model_runner
from tests.parity.engine_runs import SEEDED, answer, answer_preempted, requests_of
from tests.unit.model.late_device import LateDevice

from nightmill.sampling import SamplingParams
from nightmill_worker.engine.options import AdmissionRule, LoopOptions, PreemptionMode
from nightmill_worker.engine.request import Request
from nightmill_worker.model.device_runner import DeviceRunner

OPTIONS = LoopOptions(max_num_seqs=10, max_num_batched_tokens=32, max_model_len=200, async_scheduling=True)
GREEDY = SamplingParams(temperature=0.0)
WITHOUT_HISTORY = (GREEDY, *SEEDED[:4], SamplingParams(temperature=0.0, logprobs=3))


@pytest.fixture(params=[False, True], ids=["graphs", "eager"])
def runner(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DeviceRunner]:
    runner = device_runner(tmp_path, enforce_eager=request.param, device=LateDevice())
    yield runner
    runner.close()


def requests(samplings: tuple[SamplingParams, ...], count: int = 20, max_tokens: int = 9) -> list[Request]:
    random = np.random.default_rng(0)
    common = tuple(random.integers(0, VOCAB_SIZE - 1, 2 * PAGE_SIZE).tolist())
    tails = [tuple(random.integers(0, VOCAB_SIZE - 1, random.integers(1, 30)).tolist()) for _ in range(count)]
    prompts = [common + tail if i % 2 else tail for i, tail in enumerate(tails)]
    return requests_of(prompts, samplings, max_tokens=max_tokens)


def with_stops(rows: list[Request], tokens: list[list[int]]) -> list[Request]:
    """Every other row ends by its fourth token, which nobody knows before."""
    return [
        replace(row, sampling=replace(row.sampling, stop_token_ids=(tokens[i][3],), ignore_eos=False)) if i % 2 else row
        for i, row in enumerate(rows)
    ]


@pytest.mark.parametrize("budget", [12, 200])
def test_steps_that_overlap_give_the_same_tokens(runner: DeviceRunner, budget: int, tmp_path: Path) -> None:
    options = replace(OPTIONS, max_num_batched_tokens=budget)
    rows = requests(WITHOUT_HISTORY)
    rows = with_stops(rows, answer(model_runner(tmp_path), rows, replace(options, async_scheduling=False)).tokens)
    expected = answer(model_runner(tmp_path), rows, replace(options, async_scheduling=False))
    found = answer(runner, rows, options)
    assert found.tokens == expected.tokens
    assert [row.finish_reason for row in found.rows] == [row.finish_reason for row in expected.rows]
    assert found.stats.steps_ahead > found.stats.steps // 2
    assert found.stats.padding_tokens > 0
    assert expected.stats.steps_ahead == 0


def test_rows_with_penalties_see_their_history(runner: DeviceRunner, tmp_path: Path) -> None:
    rows = requests((*SEEDED, GREEDY))
    found = answer(runner, rows, OPTIONS)
    assert found.tokens == answer(model_runner(tmp_path), rows, OPTIONS).tokens


@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
def test_preempted_rows_lose_nothing(runner: DeviceRunner, mode: PreemptionMode, tmp_path: Path) -> None:
    rows = [replace(row, job_id=f"job {i}") for i, row in enumerate(requests(WITHOUT_HISTORY, 3, max_tokens=12))]
    expected = answer(model_runner(tmp_path), rows, OPTIONS).tokens
    found = answer_preempted(runner, rows, replace(OPTIONS, preemption=mode), mode, lambda step: step % 3 == 0)
    assert found.tokens == expected


def test_a_pool_that_runs_out_is_shared_as_before(runner: DeviceRunner, tmp_path: Path) -> None:
    rows = requests(WITHOUT_HISTORY, 14, max_tokens=40)
    options = replace(OPTIONS, admission=AdmissionRule.GREEDY)
    found = answer(runner, rows, options)
    assert found.tokens == answer(model_runner(tmp_path), rows, options).tokens
    assert found.stats.preemptions > 0
    assert found.stats.steps_ahead > 0
