"""Packed linear layers against fp64, on every instruction set; a row's bits are its own."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nightmill_kernels import linear as linear_module
from nightmill_kernels.backend import library_for, use_isa
from nightmill_kernels.cpu.isa import REFERENCE, available_isas
from nightmill_kernels.gated_mul import Gate, gated_mul
from nightmill_kernels.linear import PackedLinear
from nightmill_kernels.reference import linear as reference

# fp32: K sums of K · 2^-24 in the worst case, far less by chance. bf16: the result's own rounding.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-8 + 2**-12}
# (outputs, inputs): whole panels; a part of one; odd inputs; more than one block of the summed dimension, whole and odd
SHAPES = [(128, 64), (70, 40), (1, 1), (33, 41), (24, 2050), (65, 2303), (17, 4096)]


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pack(weight: Tensor, bias: Tensor | None = None, gate: Gate | None = None) -> PackedLinear:
    """By the C library even where the product would be torch's."""
    library = library_for(weight)
    assert library is not None
    return PackedLinear(library, weight, bias, gate)


@pytest.fixture(params=TOLERANCE, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_equals_the_product_in_double(c_isa: str, dtype: torch.dtype, shape: tuple[int, int], has_bias: bool) -> None:
    weight, bias = random(*shape, dtype=dtype), random(shape[0], dtype=dtype, seed=1) if has_bias else None
    layer = pack(weight, bias)
    for rows in (0, 1, 5, 6, 7, 64, 200):
        x = random(rows, shape[1], dtype=dtype, seed=2)
        expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        # Relative to what was summed: cancellation costs digits of the result, not of the sum.
        scale = F.linear(x.double().abs(), weight.double().abs()) / shape[1] ** 0.5 + expected.abs()
        out = torch.full((rows, shape[0]), torch.nan, dtype=dtype)
        assert layer(x, out) is out
        assert ((out.double() - expected).abs() <= TOLERANCE[dtype] * scale).all()


@pytest.mark.parametrize("gate", Gate)
@pytest.mark.parametrize("shape", [(64, 64), (35, 41), (8, 2051), (100, 6)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_gate_changes_no_bit(
    c_isa: str, dtype: torch.dtype, gate: Gate, shape: tuple[int, int], has_bias: bool
) -> None:
    features, inputs = shape
    weight = random(2 * features, inputs, dtype=dtype) * 0.3
    bias = random(2 * features, dtype=dtype, seed=1) if has_bias else None
    for rows in (1, 6, 13):
        x = random(rows, inputs, dtype=dtype, seed=2)
        assert torch.equal(pack(weight, bias, gate)(x), gated_mul(pack(weight, bias)(x), gate))
        expected = reference.gated_linear(x, weight, bias, gelu=gate is Gate.GELU_TANH)
        assert torch.allclose(pack(weight, bias, gate)(x).float(), expected.float(), rtol=0.03, atol=0.03)


@pytest.mark.parametrize("inputs", [64, 41, 2303])
def test_a_row_gets_the_same_bits_in_any_company(c_isa: str, dtype: torch.dtype, inputs: int) -> None:
    weight = random(70, inputs, dtype=dtype)
    x = random(200, inputs, dtype=dtype, seed=1)
    layer = pack(weight)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        together = layer(x)
        for first, last in ((0, 1), (3, 9), (190, 200), (7, 20), (1, 195)):
            assert torch.equal(layer(x[first:last]), together[first:last]), f"rows {first} to {last}"


def test_not_a_number_stays_in_its_row(c_isa: str, dtype: torch.dtype) -> None:
    x = random(13, 40, dtype=dtype)
    layer = pack(random(70, 40, dtype=dtype))
    clean = layer(x)
    x[5, 7] = torch.nan
    found = layer(x)
    assert found[5].isnan().all()
    found[5] = clean[5]
    assert torch.equal(found, clean)


def test_rows_and_strides_are_read_where_they_lie(c_isa: str, dtype: torch.dtype) -> None:
    wide, weights = random(9, 100, dtype=dtype), random(70, 90, dtype=dtype)
    found = pack(weights[:, 3:44])(wide[:, 7:48])
    assert torch.equal(found, pack(weights[:, 3:44].contiguous())(wide[:, 7:48].contiguous()))
    turned, turned_weights = random(41, 9, dtype=dtype).t(), random(41, 70, dtype=dtype).t()
    found = pack(turned_weights)(turned)
    assert torch.equal(found, pack(turned_weights.contiguous())(turned.contiguous()))


@pytest.mark.parametrize("shape", [(130, 64), (65, 41), (1, 1)], ids=str)
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_the_weights_rows_can_be_read(
    c_isa: str, dtype: torch.dtype, shape: tuple[int, int], kind: torch.dtype
) -> None:
    weight = random(*shape, dtype=dtype)
    layer = pack(weight)
    index = torch.randint(shape[0], (50,), generator=torch.Generator().manual_seed(0)).to(kind)
    assert torch.equal(layer.rows(index), weight[index.long()])
    assert layer.rows(index[:0]).shape == (0, shape[1])
    place = torch.full((50, shape[1]), torch.nan, dtype=dtype)
    assert layer.rows(index, place) is place
    assert torch.equal(place, weight[index.long()])
    with pytest.raises(ValueError, match="contiguous"):
        layer.rows(index, place[1:])
    for bad in (-1, shape[0]):
        with pytest.raises(ValueError, match="outside the packed weight"):
            layer.rows(torch.tensor([0, bad], dtype=kind))


def test_what_does_not_fit_is_refused(c_isa: str) -> None:
    weight = random(8, 4, dtype=torch.bfloat16)
    layer = pack(weight)
    with pytest.raises(ValueError, match=r"must be torch.bfloat16 \[T, 4\]"):
        layer(torch.zeros(2, 5, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"must be torch.bfloat16 \[T, 4\]"):
        layer(torch.zeros(2, 4))
    with pytest.raises(ValueError, match="out"):
        layer(torch.zeros(2, 4, dtype=torch.bfloat16), torch.zeros(2, 7, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="bias"):
        linear_module.pack_linear(weight, torch.zeros(7, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="twice"):
        linear_module.pack_linear(random(7, 4, dtype=torch.bfloat16), None, Gate.SILU)
    gated = pack(weight, None, Gate.SILU)
    with pytest.raises(ValueError, match="gate"):
        gated.rows(torch.tensor([0]))


def test_more_threads_than_work(c_isa: str) -> None:
    torch.set_num_threads(4)
    weight, x = random(3, 40, dtype=torch.bfloat16), random(1, 40, dtype=torch.bfloat16)
    assert torch.allclose(pack(weight)(x).float(), F.linear(x.float(), weight.float()), rtol=0.01, atol=0.05)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("amx_bf16", {torch.float32}),
        ("avx512_bf16", {torch.float32, torch.bfloat16}),
        ("avx512", {torch.float32, torch.bfloat16}),
        ("avx2", {torch.float32, torch.bfloat16}),
        ("portable", set()),
    ],
)
def test_instruction_set_and_dtype_alone_decide_whose_product_it_is(name: str, kinds: set[torch.dtype]) -> None:
    assert {kind for kind in TOLERANCE if linear_module.is_ours(name, kind)} == kinds
    if name in available_isas():
        with use_isa(name):
            assert {kind for kind in TOLERANCE if linear_module.pack_linear(torch.ones(1, 1, dtype=kind))} == kinds
    with use_isa(REFERENCE):
        assert linear_module.pack_linear(torch.ones(1, 1)) is None
