"""Recorded decode steps: which graph takes a step, and that padding, old lists and other steps leave no trace in it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.contract.runner_subjects import FAIL_TOKEN, VOCAB_SIZE, device_runner
from tests.parity.paged_driver import DrivenSequence, PagedDriver

from nightmill_kernels.backend import use_triton
from nightmill_worker.engine.request import TokenLogprobs
from nightmill_worker.engine.step import PrefixGroups, StepPlan
from nightmill_worker.model.device import Device
from nightmill_worker.model.device_runner import DeviceRunner
from nightmill_worker.model.graphs import DecodeGraphs, graph_sizes


@pytest.fixture
def runner(tmp_path: Path) -> DeviceRunner:
    return device_runner(tmp_path)


@pytest.fixture
def eager(tmp_path: Path) -> DeviceRunner:
    return device_runner(tmp_path, enforce_eager=True)


def test_sizes() -> None:
    assert graph_sizes(1) == (1,)
    assert graph_sizes(3) == (1, 2, 3)
    assert graph_sizes(8) == (1, 2, 4, 8)
    assert graph_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert graph_sizes(32) == (1, 2, 4, 8, 16, 24, 32)
    assert graph_sizes(512)[-3:] == (496, 504, 512)
    assert graph_sizes(2000) == graph_sizes(512)
    assert len(graph_sizes(256)) == 35


def test_the_smallest_graph_that_holds_a_step_takes_it() -> None:
    graphs = DecodeGraphs(Device(), graph_sizes(20), lambda tensors, size: None)
    assert [graphs.size_for(rows) for rows in (0, 1, 2, 3, 5, 9, 17, 20, 21)] == [None, 1, 2, 4, 8, 16, 20, 20, None]


def test_all_sizes_are_recorded_at_the_start_and_none_again(runner: DeviceRunner) -> None:
    graphs = runner._graphs
    assert graphs is not None
    runner.record_decodes()
    assert graphs.num_captured == len(graphs.sizes)
    driver = PagedDriver(runner)
    for count in (1, 3, 20):
        decode(driver, sequences_of(driver, count))
    assert graphs.num_captured == len(graphs.sizes)


def sequences_of(driver: PagedDriver, count: int, seed: int = 0) -> list[DrivenSequence]:
    """Prefilled but for their last token."""
    random = np.random.default_rng(seed)
    sequences = [driver.add(random.integers(1, FAIL_TOKEN, random.integers(2, 14)).tolist()) for _ in range(count)]
    for start in range(0, count, 20):
        driver.runner.run(driver.plan([(s, len(s.tokens) - 1) for s in sequences[start : start + 20]]))
    return sequences


def logprobs_of(driver: PagedDriver, plan: StepPlan) -> list[TokenLogprobs]:
    asked = np.full(len(plan.sample.num_logprobs), 5, np.int32)
    output = driver.runner.run(replace(plan, sample=replace(plan.sample, num_logprobs=asked)))
    assert not output.failed
    return [output.logprobs[i] for i in range(len(asked))]


def decode(driver: PagedDriver, sequences: Sequence[DrivenSequence]) -> list[TokenLogprobs]:
    """One token each, which they do not keep: the same again gives the same."""
    found = logprobs_of(driver, driver.plan([(s, 1) for s in sequences]))
    for sequence in sequences:
        sequence.num_computed -= 1
    return found


def assert_close(found: Sequence[TokenLogprobs], expected: Sequence[TokenLogprobs]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.token_id == other.token_id
        assert [v for _, v in one.top] == pytest.approx([v for _, v in other.top], abs=1e-4)


@pytest.mark.parametrize("order", [range(1, 25), range(24, 0, -1), [24, 1, 23, 2, 13, 12, 24, 3, 9, 8, 17]])
def test_steps_of_any_size_one_after_the_other(order: Sequence[int], runner: DeviceRunner, eager: DeviceRunner) -> None:
    """What a larger step left behind a smaller one in the buffers is not read."""
    drivers = [PagedDriver(runner), PagedDriver(eager)]
    pools = [sequences_of(driver, 24) for driver in drivers]
    for count in order:
        chosen = np.random.default_rng(count).permutation(24)[:count]
        found, expected = (
            decode(driver, [pool[i] for i in chosen]) for driver, pool in zip(drivers, pools, strict=True)
        )
        assert_close(found, expected)
    assert runner.device.traffic.replays == len(order)
    assert eager.device.traffic.replays == 0


def test_padding_rows_change_nothing_though_they_are_not_numbers(runner: DeviceRunner) -> None:
    """They are token 0: its embedding is poisoned here, and the null page, and what graphs work in."""
    driver = PagedDriver(runner)
    sequences = sequences_of(driver, 5)
    expected = decode(driver, sequences)
    decoder = runner._loaded()
    decoder._embed.args[0][0] = torch.nan
    pages = [runner_pool for layer in decoder._layers for runner_pool in (layer._k_pages, layer._v_pages)]
    for part in pages:
        part[0] = torch.nan
    runner._logits.fill_(torch.nan)
    before = [part.clone() for part in pages]
    plan = driver.plan([(s, 1) for s in sequences])
    assert_close(logprobs_of(driver, plan), expected)
    size = runner.pool.page_size
    for part, old in zip(pages, before, strict=True):
        changed = (part.view(torch.int32) != old.view(torch.int32)).any(3).any(1)  # [pages, offset]
        slots = {page * size + offset for page, offset in changed.nonzero().tolist()}
        assert slots <= set(plan.slots.tolist()), "padding wrote somewhere"


def test_rows_that_draw_nothing_or_in_another_order(runner: DeviceRunner, eager: DeviceRunner) -> None:
    """Static batches: rows that have ended go on, padded."""
    found = []
    for one in (runner, eager):
        driver = PagedDriver(one)
        plan = driver.plan([(s, 1) for s in sequences_of(driver, 6)])
        chosen = {
            name: getattr(plan.sample, name)[[4, 0, 1]]
            for name in plan.sample.__dataclass_fields__
            if isinstance(getattr(plan.sample, name), np.ndarray)
        }
        found.append(logprobs_of(driver, replace(plan, sample=replace(plan.sample, **chosen))))
    assert_close(*found)
    assert runner.device.traffic.replays == 1


def test_a_step_with_a_chunk_or_too_many_rows_is_not_a_graphs(runner: DeviceRunner) -> None:
    driver = PagedDriver(runner)
    sequences = sequences_of(driver, 12)
    two_more = driver.add([5, 6])
    driver.runner.run(driver.plan([(s, 1) for s in sequences] + [(two_more, 2)]))
    assert runner.device.traffic.replays == 0


# ---------------------------------------------------------------- with the real kernels, interpreted


@pytest.fixture
def triton_runner(tmp_path: Path) -> Iterator[DeviceRunner]:
    with use_triton():
        yield device_runner(tmp_path, num_layers=1, num_host_pages=0)


def grouped_plan(driver: PagedDriver, count: int, shared_pages: int, *, groups: bool) -> StepPlan:
    """Decodes whose first pages are the same."""
    leader = driver.add(list(range(1, 4 * shared_pages + 1)))
    driver.runner.run(driver.plan([(leader, len(leader.tokens))]))
    sequences = []
    for i in range(count):
        sequence = driver.add([*leader.tokens[: 4 * shared_pages], 50 + i, 60 + i])
        sequence.pages, sequence.num_computed = list(leader.pages[:shared_pages]), 4 * shared_pages
        driver.runner.run(driver.plan([(sequence, 1)]))
        sequences.append(sequence)
    plan = driver.plan([(s, 1) for s in sequences])
    if not groups:
        return plan
    found = PrefixGroups(
        starts=np.array([0, count], np.int32),
        sequences=np.arange(count, dtype=np.int32),
        num_pages=np.array([shared_pages], np.int32),
    )
    return replace(plan, groups=found)


def test_rows_with_a_common_prefix_have_graphs_of_their_own(triton_runner: DeviceRunner, tmp_path: Path) -> None:
    graphs = triton_runner._graphs
    assert graphs is not None
    shared = logprobs_of(PagedDriver(triton_runner), grouped_plan(PagedDriver(triton_runner), 3, 2, groups=True))
    assert (4, True) in graphs._graphs
    plain = PagedDriver(triton_runner, seed=4)
    again = logprobs_of(plain, grouped_plan(plain, 3, 2, groups=False))
    assert (4, False) in graphs._graphs
    assert_close(shared, again)
    with use_triton():
        reference = PagedDriver(device_runner(tmp_path, enforce_eager=True, num_layers=1, num_host_pages=0))
        assert_close(shared, logprobs_of(reference, grouped_plan(reference, 3, 2, groups=True)))


def test_interpreted_steps_of_other_sizes_and_table_widths(triton_runner: DeviceRunner, tmp_path: Path) -> None:
    """The lists' header says how wide the tables are; entries of a longer list before are not read."""
    driver, plain = (
        PagedDriver(triton_runner),
        PagedDriver(device_runner(tmp_path, enforce_eager=True, num_layers=1, num_host_pages=0)),
    )
    found, expected = [], []
    for each, results in ((driver, found), (plain, expected)):
        short, long = each.add([7, 8]), each.add([int(t) for t in np.arange(40) % (VOCAB_SIZE - 3) + 1])
        for sequence in (short, long):
            each.runner.run(each.plan([(sequence, len(sequence.tokens) - 1)]))
        for rows in ([short, long], [short], [long], [long, short]):
            results.append(decode(each, rows))
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)
    assert triton_runner.device.traffic.replays == 4
