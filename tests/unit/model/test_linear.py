"""Packed linear layers equal plain ones, and plain ones stand in where torch cannot pack."""

import os
import weakref

import pytest
import torch
import torch.nn.functional as F

from nightmill_kernels.backend import use_isa
from nightmill_kernels.cpu.isa import REFERENCE, available_isas
from nightmill_kernels.gated_mul import Gate, gated_mul
from nightmill_worker.model import linear as linear_module
from nightmill_worker.model.linear import Linear
from nightmill_worker.model.threads import limit_spinning

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [1, 3, 64, 130])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("isa", [available_isas()[0], REFERENCE])
def test_equals_the_product_in_double(dtype: torch.dtype, rows: int, has_bias: bool, isa: str) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((rows, 40), (70, 40), (70,)))
    expected = F.linear(x.double(), weight.double(), bias.double() if has_bias else None)
    with torch.inference_mode(), use_isa(isa):
        found = Linear(weight, bias if has_bias else None)(x)
    assert found.dtype == dtype
    assert (found.double() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()


@pytest.mark.parametrize("isa", [available_isas()[0], REFERENCE])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("gate", [*Gate, None])
def test_gates_and_writes_where_it_is_told(isa: str, dtype: torch.dtype, gate: Gate | None) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((9, 40), (70, 40), (70,)))
    plain = F.linear(x.float(), weight.float(), bias.float()).to(dtype)
    expected = plain if gate is None else gated_mul(plain, gate)
    with torch.inference_mode(), use_isa(isa):
        layer = Linear(weight, bias, gate)
        found = layer(x)
        out = torch.full_like(found, torch.nan)
        assert layer(x, out) is out
    assert torch.equal(out, found)
    assert torch.allclose(found.float(), expected.float(), rtol=0.02, atol=0.05)


@pytest.mark.parametrize("isa", [available_isas()[0], REFERENCE])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_tied_head_gives_back_its_rows(isa: str, dtype: torch.dtype) -> None:
    weight = torch.randn(70, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    index = torch.tensor([69, 0, 3, 3], dtype=torch.int32)
    with torch.inference_mode(), use_isa(isa):
        layer, place = Linear(weight, has_rows=True), torch.full((4, 40), torch.nan, dtype=dtype)
        assert torch.equal(layer.rows(index), weight[index.long()])
        assert layer.rows(index, place) is place
        assert torch.equal(place, weight[index.long()])


def test_rows_that_were_not_asked_for_are_not_there() -> None:
    if not linear_module._can_pack("cpu", torch.float32):
        pytest.skip("this torch does not pack")
    with use_isa(REFERENCE), pytest.raises(RuntimeError, match="has_rows"):
        Linear(torch.randn(8, 4)).rows(torch.tensor([0]))


def test_a_packed_weight_is_let_go() -> None:
    if linear_module.pack_linear(torch.ones(1, 1, dtype=torch.bfloat16)) is None:
        pytest.skip("nothing is packed here with its rows")
    weight = torch.randn(70, 40).bfloat16()
    original = weakref.ref(weight)
    layer = Linear(weight, has_rows=True)
    del weight
    assert original() is None
    assert layer.rows(torch.tensor([0])).shape == (1, 40)


def test_falls_back_where_the_operators_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> torch.Tensor:
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_linear_pointwise'")

    monkeypatch.setattr(linear_module, "_packed_linear", missing)
    linear_module._can_pack.cache_clear()
    x, weight = torch.randn(2, 8), torch.randn(4, 8)
    with use_isa(REFERENCE):
        assert torch.equal(Linear(weight)(x), F.linear(x, weight))
    linear_module._can_pack.cache_clear()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)],
)
def test_spinning_is_limited_unless_the_user_decided(
    environment: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    limit_spinning()
    found = os.environ.pop("GOMP_SPINCOUNT", None)
    assert found == expected
