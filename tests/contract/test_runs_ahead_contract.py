"""What a runner that runs ahead promises (RunsAhead): for the fake device and for the one that real models run on."""

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from tests.contract.runner_subjects import FAIL_TOKEN, SUBJECTS, VOCAB_SIZE
from tests.parity.paged_driver import DrivenSequence, PagedDriver

from nightmill_worker.engine.step import Runner, RunsAhead, StepPlan, Swaps

AHEAD = ("fake-device", "device", "device-eager")


@pytest.fixture(params=AHEAD)
def runner(request: pytest.FixtureRequest, tmp_path: Path) -> Runner:
    runner = SUBJECTS[request.param](tmp_path)
    assert isinstance(runner, RunsAhead)
    return runner


def ahead(runner: Runner) -> RunsAhead:
    assert isinstance(runner, RunsAhead)
    return runner


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, VOCAB_SIZE - 1, random.integers(1, 20)).tolist() for _ in range(count)]


def decode_ahead(driver: PagedDriver, sequences: Sequence[DrivenSequence], draws: Sequence[int]) -> StepPlan:
    """A step of these sequences; `draws[i]`: which draw of the step before is the i-th one's token. It says 0."""
    for sequence in sequences:
        sequence.tokens.append(0)
    plan = driver.plan([(sequence, 1) for sequence in sequences])
    return replace(plan, token_source=np.array(draws, np.int32))


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0], [2]])
def test_a_token_is_the_draw_that_was_named(runner: Runner, order: list[int]) -> None:
    expected = PagedDriver(runner, seed=1).generate(prompts(4), max_tokens=4)
    driver = PagedDriver(runner, seed=2)
    sequences = [driver.add(prompt) for prompt in prompts(4)]
    going_on = [sequences[i] for i in order]
    ahead(runner).submit(driver.plan([(s, len(s.tokens)) for s in sequences]))
    ahead(runner).submit(decode_ahead(driver, going_on, order))
    drawn = [ahead(runner).collect().tokens.tolist()]
    for _ in range(2):
        ahead(runner).submit(decode_ahead(driver, going_on, range(len(order))))
        drawn.append(ahead(runner).collect().tokens.tolist())
    drawn.append(ahead(runner).collect().tokens.tolist())
    assert drawn[0] == [row[0] for row in expected]
    assert drawn[1:] == [[expected[i][n] for i in order] for n in (1, 2, 3)]


def test_a_draw_can_be_named_when_it_has_been_collected(runner: Runner) -> None:
    expected = PagedDriver(runner, seed=1).generate(prompts(2), max_tokens=2)
    driver = PagedDriver(runner, seed=2)
    sequences = [driver.add(prompt) for prompt in prompts(2)]
    ahead(runner).submit(driver.plan([(s, len(s.tokens)) for s in sequences]))
    ahead(runner).collect()
    ahead(runner).submit(decode_ahead(driver, sequences, [0, 1]))
    assert ahead(runner).collect().tokens.tolist() == [row[1] for row in expected]


def test_the_plan_is_the_engines_again_when_submit_returns(runner: Runner) -> None:
    expected = PagedDriver(runner, seed=1).generate(prompts(3), max_tokens=1)
    driver = PagedDriver(runner, seed=2)
    plan = driver.plan([(driver.add(prompt), len(prompt)) for prompt in prompts(3)])
    ahead(runner).submit(plan)
    for part in (plan, plan.sample):
        for field in fields(part):
            value = getattr(part, field.name)
            if isinstance(value, np.ndarray):
                value.fill(1)
    assert ahead(runner).collect().tokens.tolist() == [row[0] for row in expected]


def test_two_steps_are_in_flight_at_most(runner: Runner) -> None:
    driver = PagedDriver(runner)
    plans = [driver.plan([(driver.add(prompt), len(prompt))]) for prompt in prompts(3)]
    with pytest.raises(RuntimeError, match="no step is in flight"):
        ahead(runner).collect()
    ahead(runner).submit(plans[0])
    with pytest.raises(RuntimeError, match="in flight"):
        runner.run(plans[2])
    ahead(runner).submit(plans[1])
    with pytest.raises(RuntimeError, match="in flight"):
        ahead(runner).submit(plans[2])
    ahead(runner).collect()
    ahead(runner).submit(plans[2])
    ahead(runner).collect()
    ahead(runner).collect()
    assert len(runner.run(plans[2]).tokens) == 1


def test_a_failed_row_may_be_in_the_next_step_and_harms_nobody(runner: Runner) -> None:
    expected = PagedDriver(runner, seed=1).generate([[1, 2]], max_tokens=2)
    driver = PagedDriver(runner, seed=2)
    failing, sound = driver.add([3, FAIL_TOKEN, 5]), driver.add([1, 2])
    ahead(runner).submit(driver.plan([(failing, 3), (sound, 2)]))
    ahead(runner).submit(decode_ahead(driver, [failing, sound], [0, 1]))
    outputs = [ahead(runner).collect() for _ in range(2)]
    assert [set(output.failed) for output in outputs] == [{0}, {0}]
    assert [int(output.tokens[1]) for output in outputs] == expected[0]


def test_copies_keep_their_place_among_steps_in_flight(runner: Runner) -> None:
    """Out: what the step before wrote. In: before the step after reads it."""
    assert isinstance(runner, Swaps)
    (expected,) = PagedDriver(runner, seed=1).generate([prompts(1, seed=4)[0]], max_tokens=2)
    driver = PagedDriver(runner, seed=2)
    prompt = prompts(1, seed=4)[0]
    sequence, other = driver.add(prompt), driver.add([7] * len(prompt))
    ahead(runner).submit(driver.plan([(sequence, len(prompt))]))
    own, host = np.array(sequence.pages, np.int32), np.arange(len(sequence.pages), dtype=np.int32)
    runner.swap_out(own, host)
    other.pages = list(sequence.pages)  # given away as soon as swap_out has returned
    ahead(runner).submit(driver.plan([(other, len(prompt))]))
    drawn = ahead(runner).collect().tokens.tolist()
    runner.swap_in(host, own)
    sequence.tokens.append(drawn[0])
    ahead(runner).submit(driver.plan([(sequence, 1)]))
    ahead(runner).collect()
    assert [*drawn, *ahead(runner).collect().tokens.tolist()] == expected


def test_a_closed_runner_says_so(runner: Runner) -> None:
    driver = PagedDriver(runner)
    plan = driver.plan([(driver.add([1, 2]), 2)])
    ahead(runner).submit(plan)
    runner.close()
    with pytest.raises(RuntimeError, match="closed"):
        ahead(runner).submit(plan)
