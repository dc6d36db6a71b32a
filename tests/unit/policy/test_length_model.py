import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nightmill_worker.engine.length_model import PRIOR_MEAN_TOKENS, LengthDistribution, LengthModel

NONE = np.zeros(0, np.int64)


def ints(*values):
    return np.array(values, np.int64)


@pytest.mark.parametrize("max_tokens", [1, 16, 256, 257, 1000, 32768, 131072])
def test_the_prior_mean_is_max_tokens_or_256(max_tokens):
    expected = LengthModel().expected("job", "low", max_tokens)
    assert expected == pytest.approx(min(max_tokens, PRIOR_MEAN_TOKENS), rel=0.02)


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 80), max_size=40),
    st.lists(st.integers(0, 80), max_size=20),
    st.integers(0, 79),
    st.integers(1, 80),
)
def test_moments_agree_with_the_survival_table(finished, running, generated, limit):
    model = LengthDistribution(80)
    for length in finished:
        model.observe(length)
    model.fit(np.array(running, np.int64))
    assert np.all(np.diff(model.survival) <= 1e-12)
    got = model.remaining(ints(generated), ints(limit))
    if generated >= limit:
        assert (got.mean[0], got.variance[0]) == (0, 0)
        return
    alive = model.survival[generated:limit] / model.survival[generated]
    # P(R = j): ends at its j-th further token, the limit takes the rest.
    chance = np.append(alive[:-1] - alive[1:], alive[-1])
    steps = np.arange(1, limit - generated + 1)
    mean = float((chance * steps).sum())
    assert got.mean[0] == pytest.approx(mean, rel=1e-6)
    assert got.variance[0] == pytest.approx(float((chance * (steps - mean) ** 2).sum()), rel=1e-4, abs=1e-5)


def test_enough_rows_outweigh_the_prior():
    model = LengthDistribution(1000)
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.geometric(1 / 60, size=2000), 1000)
    for length in lengths:
        model.observe(int(length))
    model.fit(NONE)
    got = model.remaining(ints(0, 100), ints(1000, 1000))
    assert got.mean[0] == pytest.approx(lengths.mean(), rel=0.03)
    assert got.mean[1] == pytest.approx((lengths[lengths > 100] - 100).mean(), rel=0.15)
    assert got.variance[0] == pytest.approx(lengths.var(), rel=0.10)


def test_running_rows_correct_the_bias_of_those_that_finished_early():
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 801, size=3000)
    seen = 200  # all started together 200 tokens ago: only the short ones have finished
    biased, fair = LengthDistribution(800), LengthDistribution(800)
    for length in lengths[lengths <= seen]:
        biased.observe(int(length))
        fair.observe(int(length))
    biased.fit(NONE)
    fair.fit(np.full(int((lengths > seen).sum()), seen))
    assert fair.survival[seen] == pytest.approx((lengths > seen).mean(), abs=0.02)
    assert biased.survival[seen] < 0.1


def test_a_row_cut_by_max_tokens_is_no_evidence_that_rows_end_there():
    model = LengthDistribution(400)
    for _ in range(200):
        model.observe(100, is_censored=True)
    model.fit(NONE)
    assert model.survival[100] > 0.95


def test_fixed_lengths_are_learnt_as_fixed():
    model = LengthDistribution(1000)
    for _ in range(500):
        model.observe(40)
    model.fit(NONE)
    got = model.remaining(ints(0, 30), ints(1000, 1000))
    assert got.mean[0] == pytest.approx(40, rel=0.15)
    assert np.sqrt(got.variance[0]) < 35  # the prior still allows for a few long ones


def test_old_rows_fade():
    model = LengthDistribution(1000)
    for length in [500] * 10_000 + [20] * 10_000:
        model.observe(length)
    model.fit(NONE)
    assert model.remaining(ints(0), ints(1000)).mean[0] < 100


def test_alive_after_starts_at_one_and_ends_at_the_limit():
    model = LengthDistribution(100)
    alive = model.alive_after(ints(0, 10, 60), ints(0, 1, 39, 40, 99), ints(100, 50, 100))
    assert alive[:, 0] == pytest.approx([1, 1, 1])
    assert np.all(np.diff(alive, axis=1) <= 1e-12)
    assert alive[1, 3] == 0
    assert alive[2, 3] == 0
    assert alive[0, 4] > 0


def test_growing_keeps_what_was_learnt():
    model = LengthDistribution(300)
    for _ in range(400):
        model.observe(50)
    model.grow(5000)
    model.fit(NONE)
    assert model.remaining(ints(0), ints(5000)).mean[0] == pytest.approx(50, rel=0.2)
    assert model.max_tokens == 5000


def test_refits_become_rare():
    model = LengthDistribution(100)
    fits = 0
    for _ in range(4000):
        model.observe(10)
        if model.needs_fit():
            model.fit(NONE)
            fits += 1
    assert fits < 150


def test_jobs_and_tiers_are_apart():
    model = LengthModel()
    for _ in range(300):
        model.distribution("a", "low", 1000).observe(10)
    model.distribution("a", "low", 1000).fit(NONE)
    assert model.expected("a", "low", 1000) < 20
    assert model.expected("a", "high", 1000) == pytest.approx(256, abs=5)
    assert model.expected("b", "low", 1000) == pytest.approx(256, abs=5)
    model.forget_job("a")
    assert model.expected("a", "low", 1000) == pytest.approx(256, abs=5)
