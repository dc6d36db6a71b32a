"""Steps on a device that works behind the host's back: what they cost in copies, and that they give the same tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.contract.runner_subjects import NUM_HOST_PAGES, PAGE_SIZE, VOCAB_SIZE, device_runner, model_runner
from tests.parity.engine_runs import SEEDED, answer, answer_preempted, requests_of
from tests.parity.paged_driver import DrivenSequence, PagedDriver
from tests.unit.model.late_device import LateDevice
from tests.unit.model.launch_counter import LaunchCounter

from nightmill.sampling import SamplingParams
from nightmill_worker.engine.loop import EngineLoop
from nightmill_worker.engine.options import LoopOptions, PreemptionMode
from nightmill_worker.engine.request import Request
from nightmill_worker.engine.step import RunsAhead, StepPlan
from nightmill_worker.model.device_runner import DeviceRunner

OPTIONS = LoopOptions(max_num_seqs=10, max_num_batched_tokens=32, max_model_len=200)
EVERY_WAY = (SamplingParams(temperature=0.0), *SEEDED, SamplingParams(temperature=0.0, logprobs=3))


@pytest.fixture(params=[False, True], ids=["graphs", "eager"])
def runner(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DeviceRunner]:
    runner = device_runner(tmp_path, enforce_eager=request.param, device=LateDevice())
    yield runner
    runner.close()


def prompts(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Some begin alike; all without the token that fails."""
    random = np.random.default_rng(seed)
    common = tuple(random.integers(0, VOCAB_SIZE - 1, 2 * PAGE_SIZE).tolist())
    tails = [tuple(random.integers(0, VOCAB_SIZE - 1, random.integers(1, 30)).tolist()) for _ in range(count)]
    return [common + tail if i % 2 else tail for i, tail in enumerate(tails)]


def requests(count: int = 20, max_tokens: int = 9) -> list[Request]:
    return requests_of(prompts(count), EVERY_WAY, max_tokens=max_tokens)


# ---------------------------------------------------------------- what a step costs


def test_every_step_of_an_engine_makes_one_copy_to_the_device_and_one_back_at_most(runner: DeviceRunner) -> None:
    """Prefills, chunks, decodes of every kind, with logprobs, penalties and seeds, rows that come and go."""
    traffic = runner.device.traffic
    before, costs = traffic.snapshot(), []

    def after_step(_: EngineLoop) -> None:
        nonlocal before
        costs.append(traffic.since(before))
        before = traffic.snapshot()

    result = answer(runner, requests(), OPTIONS, after_step)
    assert sum(cost.to_device for cost in costs) == result.stats.steps
    assert sum(cost.to_host for cost in costs) <= result.stats.steps
    assert max(cost.waits for cost in costs) <= 1
    assert sum(cost.replays for cost in costs) > 0 or runner._graphs is None


def test_launches_of_a_decode_step(tmp_path: Path) -> None:
    """Launch by launch, a decode costs some ten launches a layer; recorded, one graph and what draws."""
    launches = {}
    for name, eager in (("graphs", False), ("eager", True)):
        runner = device_runner(tmp_path, enforce_eager=eager)
        driver = PagedDriver(runner)
        sequences = [driver.add(prompt) for prompt in prompts(5)]
        runner.run(driver.plan([(s, len(s.tokens)) for s in sequences]))
        for _ in range(2):  # the first records
            for sequence in sequences:
                sequence.tokens.append(1)
            plan = driver.plan([(s, 1) for s in sequences])
            before = runner.device.traffic.snapshot()
            with LaunchCounter(runner.device) as counter:
                runner.run(plan)
        used = runner.device.traffic.since(before)
        assert (used.to_device, used.to_host) == (1, 1)
        launches[name] = counter.launches
        assert used.replays == (0 if eager else 1)
    assert launches["graphs"] <= 3, "a greedy draw, and what keeps its tokens for the next step"
    assert launches["eager"] > launches["graphs"] + 10


def test_logprobs_of_more_rows_than_ever_before_still_come_in_one_copy(runner: DeviceRunner) -> None:
    before = runner.device.traffic.snapshot()
    wanted = requests_of(prompts(8), [SamplingParams(temperature=0.0, logprobs=20)], max_tokens=3)
    result = answer(runner, wanted, OPTIONS)
    assert runner.device.traffic.since(before).to_host <= result.stats.steps
    assert all(len(row.logprobs or ()) == 3 for row in result.rows)


# ---------------------------------------------------------------- the same answers


@pytest.mark.parametrize("budget", [12, 32, 200])
def test_an_engine_gives_what_it_gives_on_the_plain_runner(runner: DeviceRunner, budget: int, tmp_path: Path) -> None:
    options = replace(OPTIONS, max_num_batched_tokens=budget)
    assert answer(runner, requests(), options).tokens == answer(model_runner(tmp_path), requests(), options).tokens


@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
def test_preempted_rows_lose_nothing(runner: DeviceRunner, mode: PreemptionMode, tmp_path: Path) -> None:
    rows = [replace(request, job_id=f"job {i}") for i, request in enumerate(requests(3, max_tokens=12))]
    expected = answer(model_runner(tmp_path), rows, OPTIONS).tokens
    found = answer_preempted(runner, rows, replace(OPTIONS, preemption=mode), mode, lambda step: step % 3 == 0)
    assert found.tokens == expected
    assert NUM_HOST_PAGES >= 3 * 4


# ---------------------------------------------------------------- ahead of the host


def decode_ahead(driver: PagedDriver, sequences: Sequence[DrivenSequence], rows: Sequence[int]) -> StepPlan:
    """A step of these sequences, each with the token that row `rows[i]` of the step before draws."""
    for sequence in sequences:
        sequence.tokens.append(0)  # not known yet; the device must not use it
    plan = driver.plan([(sequence, 1) for sequence in sequences])
    return replace(plan, token_source=np.array(rows, np.int32))


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 2, 0], [3]])
def test_a_step_takes_tokens_that_only_the_device_knows(runner: DeviceRunner, order: list[int]) -> None:
    """Three steps deep; sequences that leave move the others to other rows."""
    assert isinstance(runner, RunsAhead)
    expected = PagedDriver(runner).generate(prompts(5, seed=3), max_tokens=3)
    driver = PagedDriver(runner, seed=9)
    sequences = [driver.add(prompt) for prompt in prompts(5, seed=3)]
    first = driver.plan([(s, len(s.tokens)) for s in sequences])
    runner.submit(first)
    runner.submit(decode_ahead(driver, [sequences[i] for i in order], order))
    drawn = [runner.collect().tokens.tolist()]
    runner.submit(decode_ahead(driver, [sequences[i] for i in order], range(len(order))))
    drawn += [runner.collect().tokens.tolist(), runner.collect().tokens.tolist()]
    assert drawn[0] == [row[0] for row in expected]
    assert drawn[1:] == [[expected[i][n] for i in order] for n in (1, 2)]


def test_known_tokens_and_chunks_stand_beside_unknown_ones(runner: DeviceRunner) -> None:
    chosen = prompts(3, seed=5)
    expected = PagedDriver(runner).generate(chosen, max_tokens=2)
    driver = PagedDriver(runner, seed=1)
    first, second, third = (driver.add(prompt) for prompt in chosen)
    runner.submit(driver.plan([(first, len(first.tokens)), (second, len(second.tokens))]))
    second.tokens.append(0)
    plan = driver.plan([(third, len(third.tokens)), (second, 1)])
    source = np.full(plan.num_tokens, -1, np.int32)
    source[-1] = 1
    runner.submit(replace(plan, token_source=source))
    source.fill(0)
    assert runner.collect().tokens.tolist() == [expected[0][0], expected[1][0]]
    assert runner.collect().tokens.tolist() == [expected[2][0], expected[1][1]]


def test_steps_in_flight_are_bounded_and_run_needs_none(runner: DeviceRunner) -> None:
    driver = PagedDriver(runner)
    plans = [driver.plan([(driver.add(prompt), len(prompt))]) for prompt in prompts(3)]
    runner.submit(plans[0])
    with pytest.raises(RuntimeError, match="collect"):
        runner.run(plans[1])
    runner.submit(plans[1])
    with pytest.raises(RuntimeError, match="in flight"):
        runner.submit(plans[2])
    runner.collect()
    runner.collect()
    with pytest.raises(RuntimeError, match="no step"):
        runner.collect()


def test_a_failed_row_leaves_a_token_that_the_next_step_can_look_up(runner: DeviceRunner) -> None:
    """Its sequence ends once the host knows; by then it may be in flight again."""
    driver = PagedDriver(runner)
    failing, sound = driver.add([3, 100, 5]), driver.add([1, 2])
    runner.submit(driver.plan([(failing, 3), (sound, 2)]))
    runner.submit(decode_ahead(driver, [failing, sound], [0, 1]))
    assert set(runner.collect().failed) == {0}
    assert set(runner.collect().failed) == {0}


def test_seconds_are_the_devices(runner: DeviceRunner) -> None:
    driver = PagedDriver(runner)
    assert runner.run(driver.plan([(driver.add([1, 2]), 2)])).seconds == 0.0  # what LateDevice says


def test_a_closed_runner_says_so(runner: DeviceRunner) -> None:
    plan = PagedDriver(runner).plan([(PagedDriver(runner).add([1]), 1)])
    runner.close()
    for call in (lambda: runner.run(plan), lambda: runner.swap_out(plan.query_starts, plan.query_starts)):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_logits_for_scoring(runner: DeviceRunner, tmp_path: Path) -> None:
    found, expected = (
        r.compute_logits(PagedDriver(r).plan([(PagedDriver(r).add(PROMPT), len(PROMPT))], every_token=True))
        for r in (runner, model_runner(tmp_path))
    )
    assert torch.equal(found, expected)


PROMPT = [5, 17, 3, 44, 9]
