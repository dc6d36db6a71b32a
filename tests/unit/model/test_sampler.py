"""The sampler against a second implementation, its edge cases, and a row's independence of its batch."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.model.reference_sampler import Row, adjusted, batch_of, draw

from nightmill_worker.engine.step import StepOutput
from nightmill_worker.model.sampler import sample

V = 50  # fewer tokens than the candidates that most rows are settled by
LARGE = 300  # more of them
GREEDY = Row(temperature=0.0)


def run(logits: torch.Tensor, rows: list[Row]) -> StepOutput:
    return sample(logits.clone(), batch_of(rows))


def random_logits(count: int, *, seed: int = 0, vocab_size: int = V, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


rows = st.builds(
    Row,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 3, 49, 50, 127, 128, 129, 299, 1000]),
    top_p=st.sampled_from([0.0, 0.2, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.001, 0.05, 1.0]),
    presence=st.sampled_from([0.0, 1.5]),
    frequency=st.sampled_from([0.0, -0.75]),
    repetition=st.sampled_from([1.0, 1.5]),
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(1, 2**40),
    num_logprobs=st.sampled_from([-1, 0, 3]),
    history=st.lists(st.integers(0, V - 1), min_size=2, max_size=12).map(tuple),
    prompt_length=st.integers(0, 2),
    banned=st.lists(st.integers(0, V - 1), max_size=3).map(tuple),
)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(rows, min_size=1, max_size=6),
    seed=st.integers(0, 99),
    vocab_size=st.sampled_from([V, LARGE]),
    scale=st.sampled_from([0.5, 3.0]),
    is_coarse=st.booleans(),
)
def test_equals_the_plain_implementation(
    rows: list[Row], seed: int, vocab_size: int, scale: float, is_coarse: bool
) -> None:
    logits = random_logits(len(rows), seed=seed, vocab_size=vocab_size, scale=scale)
    if is_coarse:  # many ties, as in bfloat16; eighths, so that float32 and float64 agree on what ties
        logits = (logits * 8).round() / 8
    expected = [draw(line.double().numpy(), row) for line, row in zip(logits, rows, strict=True)]
    assert run(logits, rows).tokens.tolist() == expected


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(rows, min_size=2, max_size=8),
    seed=st.integers(0, 99),
    vocab_size=st.sampled_from([V, LARGE]),
)
def test_a_mixed_batch_equals_its_rows_alone(rows: list[Row], seed: int, vocab_size: int) -> None:
    logits = random_logits(len(rows), seed=seed, vocab_size=vocab_size)
    together = run(logits, rows)
    for i, row in enumerate(rows):
        alone = run(logits[i : i + 1], [row])
        assert alone.tokens[0] == together.tokens[i]
        assert alone.logprobs.get(0) == together.logprobs.get(i)


@pytest.mark.parametrize("vocab_size", [4097, 49152])
def test_a_mixed_batch_equals_its_rows_alone_at_model_size(vocab_size: int) -> None:
    # Flat enough that top-p must widen its candidates, and that plain rows draw noise for the whole vocabulary.
    logits = random_logits(12, vocab_size=vocab_size, scale=1.0)
    kinds = [Row(), Row(top_p=0.95), Row(top_k=50, top_p=0.9), Row(min_p=0.1), Row(temperature=0.2), Row(top_k=3000)]
    rows = [replace(kinds[i % 6], seed=i, num_logprobs=2) for i in range(12)]
    together = run(logits, rows)
    for i, row in enumerate(rows):
        alone = run(logits[i : i + 1], [row])
        assert alone.tokens[0] == together.tokens[i]
        assert alone.logprobs[0] == together.logprobs[i]


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    logits = torch.zeros(2, V)
    logits[1, [7, 9, 30]] = 1.0
    assert run(logits, [GREEDY, Row(temperature=9e-6)]).tokens.tolist() == [0, 7]


def test_frequencies_are_the_softmax() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, -torch.inf]])
    n = 20_000
    tokens = run(logits.expand(n, -1), [Row(seed=i, temperature=1.5) for i in range(n)]).tokens
    expected = (logits[0] / 1.5).softmax(-1).numpy() * n
    observed = np.bincount(tokens, minlength=5)
    assert observed[4] == 0
    chi_square = float(((observed[:4] - expected[:4]) ** 2 / expected[:4]).sum())
    assert chi_square < 16.3  # 3 degrees of freedom, p = 0.001; the seeds are fixed


def test_successive_positions_draw_independently() -> None:
    n = 4_000
    tokens = run(torch.zeros(n, 2), [Row(seed=1, position=i) for i in range(n)]).tokens
    pairs = np.bincount(tokens[:-1] * 2 + tokens[1:], minlength=4)
    assert np.abs(pairs - n / 4).max() < 4 * math.sqrt(n * 3 / 16)


@pytest.mark.parametrize("row", [Row(top_k=1), Row(top_p=0.0), Row(min_p=1.0), Row(temperature=1e-4), Row(top_p=1e-9)])
def test_filters_that_leave_one_token_are_greedy(row: Row) -> None:
    logits = random_logits(30)
    assert run(logits, [replace(row, seed=i) for i in range(30)]).tokens.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("row", [Row(top_k=V), Row(top_k=2**31 - 1), Row(top_p=1.0), Row(min_p=0.0)])
def test_filters_that_leave_all_tokens_change_nothing(row: Row) -> None:
    logits = random_logits(30)
    plain = run(logits, [Row(seed=i) for i in range(30)]).tokens
    assert run(logits, [replace(row, seed=i) for i in range(30)]).tokens.tolist() == plain.tolist()


def test_top_p_of_a_flat_distribution_keeps_its_share() -> None:
    # A thousand steps: no two are equal, each has nearly the same probability, so half of them are kept.
    logits = torch.linspace(1e-3, 0, 1000).expand(4000, -1)
    tokens = run(logits, [Row(seed=i, top_p=0.5) for i in range(4000)]).tokens
    assert tokens.max() == pytest.approx(499, abs=2)


def test_top_p_shares_out_what_a_large_top_k_keeps() -> None:
    logits = torch.linspace(1e-3, 0, 1000).expand(4000, -1)
    tokens = run(logits, [Row(seed=i, top_k=400, top_p=0.5) for i in range(4000)]).tokens
    assert tokens.max() == pytest.approx(199, abs=2)


@pytest.mark.parametrize("row", [Row(min_p=0.3), Row(temperature=0.03)])
def test_top_p_holds_within_a_large_top_k_whatever_else_leaves_few_tokens(row: Row) -> None:
    logits = torch.full((1, 1000), -1.0)
    logits[0, :20] = torch.linspace(0.02, 0, 20)
    rows = [replace(row, seed=i, top_k=400, top_p=0.0) for i in range(300)]
    assert not run(logits.expand(300, -1), rows).tokens.any()


@pytest.mark.parametrize("row", [Row(top_k=10), Row(top_k=128), Row(top_k=129), Row(top_p=0.01), Row(min_p=1.0)])
def test_tokens_that_tie_with_the_last_one_kept_are_kept(row: Row) -> None:
    logits = torch.full((1, 1000), -5.0)
    logits[0, 100:300] = 2.0  # more than the candidates
    tokens = run(logits.expand(3000, -1), [replace(row, seed=i) for i in range(3000)]).tokens
    assert set(tokens.tolist()) == set(range(100, 300))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("row", [GREEDY, Row(), Row(top_k=3), Row(top_p=0.5, num_logprobs=2)])
def test_a_row_that_is_not_finite_fails_alone(bad: float, row: Row) -> None:
    logits = random_logits(3)
    clean = run(logits, [row] * 3)
    logits[1, 17] = bad
    output = run(logits, [row] * 3)
    assert list(output.failed) == [1]
    assert "not finite" in output.failed[1]
    assert output.tokens.tolist() == [clean.tokens[0], 0, clean.tokens[2]]
    assert 1 not in output.logprobs


def test_a_row_without_any_probability_fails() -> None:
    logits = random_logits(2)
    logits[0] = -torch.inf
    output = run(logits, [Row(), replace(GREEDY, banned=tuple(range(V)))])
    assert "not finite" in output.failed[0]
    assert "banned" in output.failed[1]


def test_banned_ids_are_never_drawn() -> None:
    logits = torch.zeros(200, V)
    logits[:, 3] = 50.0
    tokens = run(logits, [Row(seed=i, banned=(3, 4)) for i in range(200)]).tokens
    assert not {3, 4} & set(tokens.tolist())


def test_penalties_count_what_openai_counts() -> None:
    # Presence and frequency see the completion only, repetition the prompt too.
    logits = torch.full((3, V), -9.0)
    logits[:, [1, 2]] = torch.tensor([5.0, 4.0])
    history, prompt_length = (1, 2, 2), 1
    rows = [
        replace(GREEDY, presence=2.0, history=history, prompt_length=prompt_length),
        replace(GREEDY, repetition=1.5, history=(1,), prompt_length=1),
        replace(GREEDY, frequency=-0.6, history=history, prompt_length=prompt_length),
    ]
    assert run(logits, rows).tokens.tolist() == [1, 2, 2]


def test_logprobs_are_of_the_penalised_distribution_before_temperature() -> None:
    logits = random_logits(2)
    row = Row(
        temperature=0.5, top_k=2, num_logprobs=3, presence=2.0, history=(0, 1, 2, 3), prompt_length=1, banned=(9,)
    )
    output = run(logits, [row, replace(row, num_logprobs=-1)])
    assert list(output.logprobs) == [0]
    line = torch.tensor(adjusted(logits[0].double().numpy(), row)).log_softmax(-1)
    found = output.logprobs[0]
    assert found.token_id == output.tokens[0]
    assert found.logprob == pytest.approx(float(line[found.token_id]), abs=1e-5)
    assert [token for token, _ in found.top] == line.topk(3).indices.tolist()
    assert [value for _, value in found.top] == pytest.approx(line.topk(3).values.tolist(), abs=1e-5)


def test_draws_do_not_depend_on_the_row_they_stand_in() -> None:
    logits = random_logits(1).expand(9, -1)
    rows = [Row(seed=42)] * 9
    assert len(set(run(logits, rows).tokens.tolist())) == 1
