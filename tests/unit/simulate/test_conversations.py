"""The published conversation trace (19,366 requests) on the real scheduler: the figures the project is held to."""

from dataclasses import replace
from math import ceil
from pathlib import Path

import pytest

from nightmill_worker.engine.options import AdmissionRule, Policy
from nightmill_worker.simulate.cost_model import DEVICES, MODELS, CostModel
from nightmill_worker.simulate.report import policy_report
from nightmill_worker.simulate.simulation import Simulation, SimulationOptions
from nightmill_worker.simulate.trace import read_trace

pytestmark = pytest.mark.long
COST = CostModel(DEVICES["h200"], MODELS["qwen3-0.6b"])
ROOMY = SimulationOptions(cost=COST, max_num_seqs=256)
TIGHT = replace(ROOMY, pool_tokens=80_000, page_size=16)
PAGES = 80_000 // 16


@pytest.fixture(scope="module")
def trace():
    return read_trace(Path(__file__).parents[2] / "data/azure_llm_2023_conv.csv.gz")


def figures(trace, options, policy=Policy.CONTINUOUS):
    result = Simulation(trace, options, policy).run()
    return policy_report(trace, result, COST, max_num_seqs=options.max_num_seqs, page_size=options.page_size)


@pytest.fixture(scope="module")
def lower_bound(trace):
    """Steps that the pool alone asks for: page-steps of every request over the pool's pages."""
    page_steps = 0
    for row in trace.rows:
        # Step i of an answer holds the pages of its prompt and i tokens.
        page_steps += sum(ceil((row.context_tokens + i) / 16) for i in range(row.generated_tokens))
    return page_steps / PAGES


def test_continuous_batching_against_static(trace):
    static, continuous = (figures(trace, ROOMY, policy) for policy in (Policy.STATIC, Policy.CONTINUOUS))
    assert static.output_tokens == continuous.output_tokens == sum(row.generated_tokens for row in trace.rows)
    assert static.steps >= 3 * continuous.steps
    assert static.seconds >= 2 * continuous.seconds
    assert continuous.bound_seconds >= 0.75 * continuous.seconds


def test_known_lengths_fill_a_tight_pool_without_a_preemption(trace, lower_bound):
    known = figures(trace, TIGHT)
    assert lower_bound <= known.steps <= lower_bound / 0.92
    assert known.preemptions == 0
    reserve = figures(trace, replace(TIGHT, admission=AdmissionRule.RESERVE))
    assert reserve.steps > known.steps


def test_unknown_lengths_cost_little_more(trace, lower_bound):
    known = figures(trace, TIGHT)
    unknown = figures(trace, replace(TIGHT, is_length_known=False, max_tokens=1000))
    assert unknown.recomputed_tokens <= 0.01 * unknown.output_tokens
    assert unknown.steps <= 1.10 * known.steps
    greedy = figures(
        trace, replace(TIGHT, is_length_known=False, max_tokens=1000, admission=AdmissionRule.GREEDY, host_tokens=0)
    )
    assert greedy.recomputed_tokens > unknown.recomputed_tokens
