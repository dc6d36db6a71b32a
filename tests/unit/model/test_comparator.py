"""The comparator: near ties are counted, anything wider fails, and only the first divergence is judged."""

from nightmill_worker.bench.comparator import ReferenceStep, compare_greedy


def step(token: int, other: int, gap: float, top: float = 10.0) -> ReferenceStep:
    return ReferenceStep(token, {token: top, other: top - gap}, top)


def test_equal_rows_pass() -> None:
    comparison = compare_greedy([[step(1, 2, 3.0)], []], [[1], []], dtype="float32")
    assert (comparison.num_identical, comparison.near_ties, comparison.failures) == (2, (), ())


def test_a_near_tie_is_counted_and_what_follows_is_not_judged() -> None:
    reference = [[step(1, 2, 5e-5), step(7, 8, 9.0)]]
    comparison = compare_greedy(reference, [[2, 3]], dtype="float32")
    assert (len(comparison.near_ties), comparison.failures) == (1, ())
    assert str(comparison) == "0 of 1 rows identical, 1 near ties"


def test_a_wide_gap_fails_and_says_where() -> None:
    comparison = compare_greedy([[step(1, 2, 3.0), step(4, 5, 0.2)]], [[1, 5]], dtype="float32")
    assert "row 0, generated token 1: expected 4, got 5" in str(comparison)


def test_bfloat16_allows_in_proportion_to_the_largest_logit() -> None:
    assert not compare_greedy([[step(1, 2, 0.15)]], [[2]], dtype="bfloat16").failures
    assert compare_greedy([[step(1, 2, 0.16)]], [[2]], dtype="bfloat16").failures


def test_a_token_that_was_no_candidate_fails() -> None:
    assert compare_greedy([[step(1, 2, 0.0)]], [[9]], dtype="bfloat16").failures


def test_another_length_without_a_divergence_fails() -> None:
    reference = [[step(1, 2, 3.0), step(1, 2, 3.0)]]
    assert compare_greedy(reference, [[1]], dtype="float32").failures
    assert compare_greedy(reference, [[1, 1, 1]], dtype="float32").failures
