import numpy as np
import pytest

from nightmill_worker.engine.step import SampleBatch, StepPlan
from nightmill_worker.simulate.cost_model import DEVICES, MODELS, CostModel, Work, step_work
from nightmill_worker.simulate.trace import Trace, TraceRow


@pytest.mark.parametrize(
    ("model", "weights_gb", "kv"),
    [("smollm2-135m", 0.269, 23040), ("qwen3-0.6b", 1.192, 114688), ("llama-3.1-8b", 15.01, 131072)],
)
def test_sizes_are_the_published_ones(model, weights_gb, kv):
    shape = MODELS[model]
    assert shape.step_weight_bytes / 1e9 == pytest.approx(weights_gb, abs=0.005)
    assert shape.kv_bytes_per_token == kv


@pytest.mark.parametrize(("model", "ms"), [("smollm2-135m", 1.49), ("qwen3-0.6b", 7.38), ("llama-3.1-8b", 12.9)])
def test_a_decode_step_of_256_rows_at_context_1024(model, ms):
    work = Work(tokens=256, logit_rows=256, attended=256 * 1024, context_read=256 * 1024)
    assert CostModel(DEVICES["h200"], MODELS[model]).seconds(work, 1) * 1e3 == pytest.approx(ms, abs=0.04)


def plan(*sequences):
    """Of (tokens in the step, context) pairs; all draw."""
    counts, contexts = (np.array(column) for column in zip(*sequences, strict=True))
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    rows, tokens = len(counts), int(counts.sum())
    blank = {name: np.zeros(rows, np.float32) for name in ("temperature", "top_p", "min_p", "presence_penalty")}
    blank |= {name: np.zeros(rows, np.float32) for name in ("frequency_penalty", "repetition_penalty")}
    sample = SampleBatch(
        sequence=np.arange(rows, dtype=np.int32),
        token_index=starts[1:] - 1,
        position=contexts.astype(np.int64),
        seed=np.zeros(rows, np.uint64),
        top_k=np.zeros(rows, np.int32),
        num_logprobs=np.full(rows, -1, np.int32),
        any_random=False,
        **blank,
    )
    return StepPlan(
        step=0,
        token_ids=np.zeros(tokens, np.int32),
        positions=np.zeros(tokens, np.int32),
        slots=np.zeros(tokens, np.int64),
        query_starts=starts,
        context_lens=contexts.astype(np.int32),
        page_tables=np.zeros((rows, 1), np.int32),
        sample=sample,
    )


def test_the_work_of_a_step_counts_what_each_token_sees():
    work = step_work(plan((1, 10), (4, 6), (3, 3)))
    assert work.tokens == 8
    assert work.logit_rows == 3
    assert work.context_read == 19
    assert work.attended == 10 + (3 + 4 + 5 + 6) + (1 + 2 + 3)


def test_the_bound_is_the_cost_of_running_it_perfectly():
    # Two requests on two slots, alike: a perfect schedule exists, and the bound is its cost on a device where all
    # steps are limited alike.
    trace = Trace.of_lengths([(1, 5), (1, 5)])
    cost = CostModel(DEVICES["h200"], MODELS["qwen3-0.6b"])
    steps = sum(cost.step_seconds(plan((1, context), (1, context))) for context in range(1, 6))
    assert cost.bound_seconds(trace, [5, 5], 2) == pytest.approx(steps, rel=1e-9)


def test_a_shared_prefix_is_computed_once_in_the_bound():
    rows = tuple(
        TraceRow(context_tokens=5000, generated_tokens=1, prefix_id="a", prefix_tokens=4999) for _ in range(50)
    )
    cost = CostModel(DEVICES["h200"], MODELS["llama-3.1-8b"])
    alone = Trace(tuple(TraceRow(context_tokens=5000, generated_tokens=1) for _ in range(50)))
    shared, private = (cost.bound_seconds(trace, [1] * 50, 256) for trace in (Trace(rows), alone))
    assert shared < private / 10


def test_a_pool_is_what_the_weights_leave():
    cost = CostModel(DEVICES["h200"], MODELS["llama-3.1-8b"])
    assert 0.8e6 < cost.pool_tokens() < 0.9e6
