"""Int8 linear layers: every implementation bit for bit against integers in numpy, and against the product in fp64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nightmill_kernels.backend import use_isa
from nightmill_kernels.cpu.isa import REFERENCE, available_isas
from nightmill_kernels.gated_mul import Gate, gated_mul
from nightmill_kernels.linear_int8 import linear_int8, quantize_weight
from nightmill_kernels.reference.linear_int8 import quantize

NAN, INF = float("nan"), float("inf")


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Normal numbers with some outliers, as activations have."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    x = torch.randn(*shape, generator=generator)
    return torch.where(torch.rand(*shape, generator=generator) < 0.02, x * 20, x).to(dtype)


def quantized(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rule, in numpy: int64 numbers and fp32 scales."""
    largest = np.abs(rows).max(axis=1, keepdims=True)
    factor = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    return np.rint(rows * factor).astype(np.int64), largest / np.float32(127)


def oracle(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    w, scale = quantized(weight.float().numpy())
    total = np.zeros((len(x), len(weight)), np.float32)
    for first in range(0, x.shape[1], 32):
        q, group_scale = quantized(x[:, first : first + 32].float().numpy())
        total += (q @ w[:, first : first + 32].T).astype(np.float32) * group_scale
    wide = total * scale.T + (0 if bias is None else bias.float().numpy())
    return torch.from_numpy(wide).to(x.dtype)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 24, 65, 200])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (3, 70), (32, 64), (77, 129), (576, 192)])
def test_bits_are_those_of_the_rule(isa: str, dtype: torch.dtype, rows: int, inputs: int, outputs: int) -> None:
    x, weight = random(rows, inputs, dtype=dtype), random(outputs, inputs, dtype=dtype, seed=1)
    bias = random(outputs, dtype=dtype) if rows % 2 else None
    assert torch.equal(linear_int8(x, quantize_weight(weight, bias)), oracle(x, weight, bias))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 300), st.integers(1, 200), st.integers(1, 4), st.booleans())
def test_implementations_agree_bit_for_bit(rows: int, inputs: int, outputs: int, threads: int, is_wide: bool) -> None:
    dtype = torch.float32 if is_wide else torch.bfloat16
    x, layer = random(rows, inputs, dtype=dtype), quantize_weight(random(outputs, inputs, dtype=dtype, seed=1))
    torch.set_num_threads(threads)
    results = []
    for name in (*available_isas(), REFERENCE):
        with use_isa(name):
            results.append(linear_int8(x, layer))
    torch.set_num_threads(1)
    assert all(torch.equal(result, results[0]) for result in results)


def test_is_as_near_to_the_product_as_halves_of_steps_allow(isa: str, dtype: torch.dtype) -> None:
    x, weight, bias = random(9, 576, dtype=dtype), random(100, 576, dtype=dtype), random(100, dtype=dtype)
    want = x.double() @ weight.double().t() + bias.double()
    steps = x.double().abs().view(9, 18, 32).amax(2).repeat_interleave(32, dim=1) / 127  # of each input
    step = weight.double().abs().amax(1) / 127
    bound = x.double().abs().sum(1, keepdim=True) * step / 2 + steps @ weight.double().abs().t() / 2
    bound = bound + steps.sum(1, keepdim=True) * step / 4 + want.abs() * 2**-8 + 1e-3
    error = (linear_int8(x, quantize_weight(weight, bias)).double() - want).abs()
    assert (error <= bound).all()
    assert error.norm() < 0.04 * want.norm()


@pytest.mark.parametrize("inputs", [32, 4096, 1 << 18])
def test_the_largest_sums_do_not_saturate(isa: str, inputs: int) -> None:
    signs = torch.where(torch.arange(inputs) % 5 < 2, -1.0, 1.0)
    x, weight = torch.stack((signs, -torch.ones(inputs))), torch.stack((signs, -signs, torch.ones(inputs)))
    found = linear_int8(x, quantize_weight(weight))
    assert torch.equal(found, oracle(x, weight, None))
    torch.testing.assert_close(found, x @ weight.t(), rtol=1e-5, atol=0.01)


def test_a_row_depends_on_itself_alone(isa: str, dtype: torch.dtype) -> None:
    x, layer = random(70, 200, dtype=dtype), quantize_weight(random(150, 200, dtype=dtype, seed=1))
    together = linear_int8(x, layer)
    for row in (0, 5, 6, 63, 69):
        assert torch.equal(linear_int8(x[row : row + 1], layer)[0], together[row])
    x[::2] = NAN
    assert torch.equal(linear_int8(x, layer)[1::2], together[1::2])


def test_a_number_of_threads_changes_nothing(isa: str) -> None:
    x, layer = random(150, 576, dtype=torch.bfloat16), quantize_weight(random(200, 576, dtype=torch.bfloat16, seed=1))
    alone = linear_int8(x, layer)
    torch.set_num_threads(3)
    assert torch.equal(linear_int8(x, layer), alone)


def test_what_is_not_a_number_shows_and_nothing_is_still_the_bias(isa: str, dtype: torch.dtype) -> None:
    weight, bias = random(70, 40, dtype=dtype), random(70, dtype=dtype)
    weight[3] = 0
    x = random(6, 40, dtype=dtype)
    x[0, 39], x[1, 7], x[2, 1], x[3], x[4] = INF, -INF, NAN, 0.0, 1e-38
    found = linear_int8(x, quantize_weight(weight, bias))
    assert found[:3].isnan().all()
    assert torch.equal(found[3], bias)
    assert torch.equal(found[4], bias)  # too small to be divided by
    assert torch.equal(found[5, 3], bias[3])
    assert found[5].isfinite().all()


def test_rows_may_lie_apart(isa: str, dtype: torch.dtype) -> None:
    wide, layer = random(9, 128, dtype=dtype), quantize_weight(random(64, 50, dtype=dtype, seed=1))
    assert torch.equal(linear_int8(wide[:, 3:53], layer), linear_int8(wide[:, 3:53].contiguous(), layer))
    assert linear_int8(wide[:0, 3:53], layer).shape == (0, 64)


def test_panels_hold_the_quantised_channels_and_zeros() -> None:
    weight = random(1100, 77, dtype=torch.bfloat16)
    bias = random(1100, dtype=torch.bfloat16)
    q, scale = quantize(weight)
    for gate in (None, Gate.SILU):
        layer = quantize_weight(weight, bias, gate)
        for found, want in zip(layer.plain(), (q, scale, bias.float()), strict=True):
            assert torch.equal(found, want)
        is_row = layer.order >= 0
        assert sorted(layer.order[is_row].tolist()) == list(range(1100))
        assert not layer.scale[~is_row].any()
        assert (layer.panels.long() - 128).sum() == q.sum(dtype=torch.int64)
        assert (layer.panels.min(), layer.panels.max()) == (1, 255)
        # A byte a weight, inputs in whole groups; scales, biases and the order add 16 bytes a column.
        assert layer.nbytes == len(layer.order) * (96 + 16)


@pytest.mark.parametrize("gate", Gate)
@pytest.mark.parametrize("features", [1, 16, 40, 77])
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_a_gate_on_the_way_out_gives_the_bits_of_one_afterwards(
    isa: str, dtype: torch.dtype, gate: Gate, features: int, rows: int
) -> None:
    x, weight = random(rows, 100, dtype=dtype), random(2 * features, 100, dtype=dtype, seed=1) / 30
    bias = random(2 * features, dtype=dtype)
    out = torch.full((rows, features), NAN, dtype=dtype)
    assert linear_int8(x, quantize_weight(weight, bias, gate), out) is out
    assert torch.equal(out, gated_mul(oracle(x, weight, bias), gate))


@pytest.mark.parametrize("outputs", [64, 70, 200])
def test_sums_over_more_inputs_than_go_through_at_once(isa: str, outputs: int) -> None:
    x, weight = random(14, 9000, dtype=torch.bfloat16), random(outputs, 9000, dtype=torch.bfloat16, seed=1)
    assert torch.equal(linear_int8(x, quantize_weight(weight)), oracle(x, weight, None))


@pytest.mark.parametrize(
    "out", [torch.empty(2, 7), torch.empty(2, 8, dtype=torch.bfloat16), torch.empty(2, 16)[:, ::2]]
)
def test_a_place_that_does_not_fit_is_refused(out: Tensor) -> None:
    with pytest.raises(ValueError, match="out"):
        linear_int8(torch.zeros(2, 40), quantize_weight(torch.ones(8, 40)), out)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.zeros(2, 41), "must be"),
        (torch.zeros(2, 2, 40), "must be"),
        (torch.zeros(2, 40, dtype=torch.float16), "float16"),
        (torch.zeros(40, 2).t(), "contiguous"),
    ],
)
def test_other_shapes_are_refused(x: Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        linear_int8(x, quantize_weight(torch.ones(8, 40)))


@pytest.mark.parametrize("shape", [(3,), (0, 4), (3, 0), (2, 3, 4)])
def test_other_weights_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="weight"):
        quantize_weight(torch.ones(shape))
    with pytest.raises(ValueError, match="even N"):
        quantize_weight(torch.ones(3, 4), gate=Gate.SILU)
