import csv

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nightmill.errors import ConfigError
from nightmill.states import Tier
from nightmill_worker.engine.options import Policy, QueueOrder
from nightmill_worker.simulate.cost_model import DEVICES, MODELS, CostModel
from nightmill_worker.simulate.report import policy_report, write_events
from nightmill_worker.simulate.simulation import Simulation, SimulationOptions
from nightmill_worker.simulate.trace import Trace, TraceRow

COST = CostModel(DEVICES["h200"], MODELS["qwen3-0.6b"])
TOY = [20] * 6 + [200] * 2
CONTINUOUS, STATIC = Policy.CONTINUOUS, Policy.STATIC


def run(trace, policy=CONTINUOUS, **options):
    options = SimulationOptions(cost=COST, **options)
    result = Simulation(trace, options, policy).run()
    report = policy_report(trace, result, COST, max_num_seqs=options.max_num_seqs, page_size=options.page_size)
    return result, report


def toy(copies):
    return Trace.of_lengths([(16, out) for out in TOY * copies])


@pytest.mark.parametrize("is_length_known", [True, False])
def test_one_copy_of_the_toy_takes_equal_steps_and_wastes_two_thirds(is_length_known):
    for policy in Policy:
        _, report = run(toy(1), policy, max_num_seqs=8, is_length_known=is_length_known)
        assert report.steps == 200
        assert report.steps * 8 == 1600
        assert report.output_tokens == 520
        assert report.mean_batch == pytest.approx(520 / 200)


@pytest.mark.parametrize("copies", [2, 20])
def test_copies_of_the_toy(copies):
    _, static = run(toy(copies), STATIC, max_num_seqs=8)
    _, continuous = run(toy(copies), CONTINUOUS, max_num_seqs=8)
    assert static.steps == 200 * copies
    assert 65 * copies <= continuous.steps <= 65 * copies + 200


def test_the_toy_tends_to_65_steps_a_copy():
    few, many = (run(toy(copies), max_num_seqs=8)[1].steps for copies in (10, 40))
    assert (many - few) / 30 == pytest.approx(65, rel=0.02)


def test_a_static_row_that_has_ended_still_costs():
    trace = Trace.of_lengths([(16, 1), (16, 1), (16, 50)])
    padded, _ = run(trace, STATIC, max_num_seqs=3)
    alone, _ = run(Trace.of_lengths([(16, 50)]), STATIC, max_num_seqs=3)
    assert padded.recorder.steps == alone.recorder.steps == 50
    assert padded.recorder.rows == [3] * 50
    assert padded.recorder.clock_s > alone.recorder.clock_s


def test_static_groups_have_max_num_seqs_rows_though_their_prompts_take_several_steps():
    trace = Trace.of_lengths([(100, 30)] * 32)
    result, report = run(trace, STATIC, max_num_seqs=16, max_num_batched_tokens=128)
    assert max(result.recorder.rows) == 16
    # 1,600 prompt tokens a group, less what decodes take of the budget, then the longest row's remaining steps.
    assert report.steps < 2 * (1600 // (128 - 16) + 1 + 30)
    first_group = result.recorder.finish_step[:16].max()
    assert result.recorder.admit_step[16:].min() > first_group


def test_known_figures_of_a_small_run(tmp_path):
    trace = Trace.of_lengths([(30, 3), (17, 1), (5, 4)])
    result, report = run(trace, max_num_seqs=2, pool_tokens=160, order=QueueOrder.ARRIVAL)
    recorder = result.recorder
    assert recorder.admit_step.tolist() == [0, 0, 1]
    assert recorder.first_token_step.tolist() == [0, 0, 1]
    assert recorder.finish_step.tolist() == [2, 0, 4]
    assert recorder.pages == [4, 3, 3, 1, 1]
    assert report.page_occupancy_mean == pytest.approx(12 / 5 / 10)
    assert report.prefill_tokens_computed == 52
    assert report.wait_s["normal"].p50 == 0
    assert report.bound_seconds <= report.seconds
    write_events(tmp_path / "e.csv", result)
    with (tmp_path / "e.csv").open(newline="") as file:
        events = list(csv.reader(file))
    assert events == [
        ["request", "admit_step", "first_token_step", "finish_step", "preempted"],
        ["0", "0", "0", "2", "0"],
        ["1", "0", "0", "0", "0"],
        ["2", "1", "1", "4", "0"],
    ]


def test_requests_come_when_they_arrive():
    rows = [TraceRow(context_tokens=10, generated_tokens=2, arrival_s=at) for at in (5.0, 1.0, 5.0)]
    result, report = run(Trace(tuple(rows)))
    assert result.recorder.admit_step.tolist() == [2, 0, 2]
    assert result.recorder.step_start_s[0] == 1.0
    assert result.recorder.step_start_s[2] == 5.0
    assert report.wait_s["normal"].p99 == 0


def test_a_shared_prefix_is_saved_and_counted():
    rows = [TraceRow(context_tokens=100, generated_tokens=4, prefix_id="p", prefix_tokens=64) for _ in range(10)]
    _, report = run(Trace(tuple(rows)), max_num_seqs=4)
    assert report.prefill_tokens_saved == report.prefill_tokens_saved_best == 9 * 64
    assert report.prefill_tokens_computed == 1000 - 9 * 64


def test_a_prompt_that_never_fits_fails_alone():
    result, report = run(Trace.of_lengths([(16, 2), (5000, 2), (16, 2)]), pool_tokens=160)
    assert list(result.failed) == [1]
    assert report.failed_requests == 1
    assert report.output_tokens == 4


def test_a_pool_without_a_page_is_refused():
    with pytest.raises(ConfigError, match="has no page of 16"):
        run(toy(1), pool_tokens=15)


ROWS = st.lists(
    st.builds(
        TraceRow,
        context_tokens=st.integers(1, 120),
        generated_tokens=st.integers(1, 20),
        tier=st.sampled_from(list(Tier)),
        arrival_s=st.sampled_from([0.0, 0.0, 0.01, 0.5]),
        job_id=st.sampled_from(["a", "b"]),
        prefix_id=st.sampled_from([None, "p", "q"]),
        prefix_tokens=st.integers(0, 1),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=30, deadline=None)
@given(ROWS, st.integers(1, 9), st.integers(16, 200), st.integers(12, 60), st.booleans(), st.sampled_from(list(Policy)))
def test_any_trace_runs_to_its_end(rows, slots, budget, pages, known, policy):
    result, report = run(
        Trace(tuple(rows)),
        policy,
        max_num_seqs=slots,
        max_num_batched_tokens=budget,
        pool_tokens=16 * pages,
        is_length_known=known,
        max_tokens=24,
        lookahead=4,
    )
    recorder = result.recorder
    assert not result.failed
    assert (recorder.admit_step >= 0).all()
    assert (recorder.admit_step <= recorder.first_token_step).all()
    assert (recorder.finish_step - recorder.first_token_step >= np.array(result.output_lens) - 1).all()
    assert max(recorder.rows) <= slots
    assert max(recorder.pages) <= result.num_pages
    assert report.bound_seconds <= report.seconds * (1 + 1e-9)
    assert result.stats.pages_active == 0
