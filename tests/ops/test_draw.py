"""Drawing tokens in C against the torch reference: the same ids, whatever the rows, the machine and the threads."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.ops.test_paged_attention import on_threads

from nightmill_kernels.backend import use_isa
from nightmill_kernels.cpu.isa import REFERENCE
from nightmill_kernels.draw import MAX_VOCAB, DrawRows, draw
from nightmill_kernels.reference import elementary
from nightmill_kernels.reference.philox import gumbel_row

KINDS = [  # temperature, min_p, top_k, top_p
    (0.0, 0.0, 0, 1.0),
    (1.0, 0.0, 0, 1.0),
    (0.3, 0.0, 0, 1.0),
    (30.0, 0.0, 0, 1.0),
    (1.0, 0.05, 0, 1.0),
    (1.0, 1.0, 0, 1.0),
    (1.0, 1e-40, 0, 1.0),
    (0.8, 0.0, 50, 1.0),
    (2.0, 0.0, 1, 1.0),
    (1.0, 0.0, 10_000_000, 1.0),
    (1.0, 0.0, 0, 0.9),
    (1.0, 0.0, 0, 0.0),
    (1.0, 0.0, 0, 0.999999),
    (0.05, 0.0, 0, 0.5),
    (1.5, 0.01, 300, 0.8),
    (1e-4, 0.3, 3, 0.7),
]


def rows_of(count: int, *, seed: int = 0, kinds=KINDS) -> DrawRows:
    generator = np.random.default_rng(seed)
    chosen = [kinds[i % len(kinds)] for i in range(count)]
    columns = [torch.tensor(column) for column in zip(*chosen, strict=True)] if count else [torch.empty(0)] * 4
    return DrawRows(
        temperature=columns[0].float(),
        min_p=columns[1].float(),
        top_k=columns[2].int(),
        top_p=columns[3].float(),
        seed=torch.from_numpy(generator.integers(-(2**63), 2**63, count)),
        position=torch.from_numpy(generator.integers(0, 2**40, count)),
    )


def reference(logits: torch.Tensor, rows: DrawRows) -> torch.Tensor:
    with use_isa(REFERENCE):
        return draw(logits, rows)


def logits_of(count: int, vocab: int, *, scale: float, seed: int = 0, dtype: torch.dtype = torch.float32):
    """Rows of a wider tensor whose other elements are NaN: reading one of them makes the row fail."""
    wide = torch.full((count, vocab + 5), math.nan)
    wide[:, :vocab] = torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)) * scale
    return wide.to(dtype)[:, :vocab]


@pytest.mark.parametrize("vocab", [1, 2, 3, 5, 15, 16, 17, 63, 64, 65, 127, 1000, 4099, 49152])
@pytest.mark.parametrize("scale", [0.0, 0.1, 3.0, 40.0])
def test_ids_are_the_references(c_isa, vocab, scale):
    count = 16 if vocab < 49152 else 32
    logits, rows = logits_of(count, vocab, scale=scale, seed=vocab), rows_of(count, seed=vocab)
    expected = reference(logits, rows)
    assert draw(logits, rows).tolist() == expected.tolist()
    assert (expected >= 0).all()
    assert (expected < vocab).all()


@pytest.mark.parametrize("scale", [0.5, 3.0, 20.0])
def test_bfloat16_logits_tie_a_lot(c_isa, scale):
    """Eight bits: thousands of ties at every cut, all of which are kept by each way to find it."""
    logits, rows = logits_of(64, 5003, scale=scale, dtype=torch.bfloat16), rows_of(64)
    assert draw(logits, rows).tolist() == reference(logits, rows).tolist()
    assert draw(logits.float(), rows).tolist() == reference(logits, rows).tolist()


@pytest.mark.parametrize("vocab", [3, 64, 131])
def test_noise_is_the_references_to_the_last_bit(c_isa, vocab):
    """Logits that level the noise out: a last bit anywhere decides who wins."""
    rows = rows_of(4000, kinds=[(1.0, 0.0, 0, 1.0)])
    noise = gumbel_row(rows.seed, rows.position, vocab)
    logits = noise.amax(dim=-1, keepdim=True) - noise
    assert draw(logits, rows).tolist() == reference(logits, rows).tolist()


@pytest.mark.long
@pytest.mark.parametrize("scale", [0.3, 2.0, 5.0])
def test_many_draws_are_the_references(scale):
    for seed in range(20):
        logits, rows = logits_of(512, 2003, scale=scale, seed=seed), rows_of(512, seed=seed)
        assert torch.equal(draw(logits, rows), reference(logits, rows))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_rows(c_isa, data):
    vocab = data.draw(st.sampled_from([1, 7, 64, 100, 511, 1025]))
    count = data.draw(st.integers(1, 5))
    logits = logits_of(
        count, vocab, scale=data.draw(st.sampled_from([0.0, 1.0, 8.0, 1e4])), seed=data.draw(st.integers(0, 99))
    )
    step = data.draw(st.sampled_from([None, 0.125, 1.0]))
    if step is not None:
        logits = (logits / step).round() * step
    if data.draw(st.booleans()):
        logits = logits.masked_fill(
            torch.rand(logits.shape, generator=torch.Generator().manual_seed(1)) < 0.7, -torch.inf
        )
    kinds = data.draw(
        st.lists(
            st.tuples(
                st.sampled_from([0.0, 1e-4, 0.7, 1.0, 5.0]),
                st.sampled_from([0.0, 0.01, 0.5, 1.0]),
                st.integers(0, vocab + 2),
                st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0]),
            ),
            min_size=1,
            max_size=5,
        )
    )
    rows = rows_of(count, seed=data.draw(st.integers(0, 99)), kinds=kinds)
    assert draw(logits, rows).tolist() == reference(logits, rows).tolist()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 63, 70, 199])
def test_a_row_that_is_not_finite_fails_alone(isa, bad, at):
    logits, rows = logits_of(16, 200, scale=1.0), rows_of(16)
    expected = draw(logits, rows).tolist()
    for broken in (1, 7, 14):
        logits[broken, at] = bad
        expected[broken] = -1
    assert draw(logits, rows).tolist() == expected


def test_minus_infinity_is_never_drawn(isa):
    logits, rows = logits_of(64, 300, scale=1.0), rows_of(64)
    allowed = torch.zeros(300, dtype=torch.bool)
    allowed[[3, 64, 128, 299]] = True
    logits = logits.masked_fill(~allowed, -torch.inf)
    logits[5] = -torch.inf
    drawn = draw(logits, rows)
    assert drawn[5] == -1
    assert {*drawn.tolist()} <= {-1, 3, 64, 128, 299}
    assert int((drawn < 0).sum()) == 1


def test_quotients_beyond_float32_fail(isa):
    logits, rows = torch.full((1, 9), 1e38), rows_of(1, kinds=[(1e-5, 0.0, 0, 1.0)])
    assert draw(logits, rows).tolist() == [-1]


def test_bits_do_not_depend_on_threads_or_on_the_other_rows(isa):
    logits, rows = logits_of(33, 5000, scale=2.0), rows_of(33)
    whole = on_threads(1, lambda: draw(logits, rows))
    assert torch.equal(on_threads(2, lambda: draw(logits, rows)), whole)
    assert torch.equal(on_threads(7, lambda: draw(logits, rows)), whole)
    order = torch.randperm(33, generator=torch.Generator().manual_seed(0))
    assert torch.equal(draw(logits[order], rows.at(order)), whole[order])
    for i in range(33):
        assert draw(logits[i : i + 1], rows.at(torch.tensor([i]))) == whole[i]


def test_no_rows(isa):
    assert draw(torch.empty(0, 7), rows_of(0)).shape == (0,)


def test_refuses_what_it_cannot_take(isa):
    logits, rows = logits_of(3, 50, scale=1.0), rows_of(3)
    for name in (field.name for field in fields(DrawRows)):
        value = getattr(rows, name)
        for wrong in (value[:2], value.repeat(2)[::2], value.double()):
            with pytest.raises(ValueError, match=name):
                draw(logits, replace(rows, **{name: wrong}))
    for wrong in (logits[0], logits.T, torch.empty(3, 0), torch.empty(3, 1).expand(3, MAX_VOCAB + 1)):
        with pytest.raises(ValueError, match="logits"):
            draw(wrong, rows)


def test_logarithm_is_precise():
    x = torch.cat(
        (torch.linspace(1e-30, 20, 100_001), torch.logspace(-37, 38, 100_001), torch.linspace(0.9, 1.1, 100_001))
    )
    found, exact = elementary.log(x).double(), x.double().log()
    assert ((found - exact).abs() <= 1.5 * 2.0**-23 * exact.abs().clamp(min=2.0**-126)).all()


def test_weights_are_precise_and_none_exceeds_the_first():
    x = torch.linspace(-40, 0, 300_001)
    found = elementary.weight(x).double() * 2.0**-elementary.WEIGHT_BITS
    assert ((found - x.double().exp()).abs() <= 2e-6 * x.double().exp() + 2.0**-42).all()
    assert elementary.weight(torch.tensor([0.0, -0.0, -100.0, -torch.inf])).tolist() == [1 << 42, 1 << 42, 0, 0]
    assert (elementary.weight(x).diff() >= 0).all(), "a larger logit weighs no less"
