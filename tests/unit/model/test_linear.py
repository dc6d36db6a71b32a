"""Packed linear layers equal plain ones, and plain ones stand in where torch cannot pack."""

import os

import pytest
import torch
import torch.nn.functional as F

from nightmill_worker.model import linear as linear_module
from nightmill_worker.model.linear import Linear
from nightmill_worker.model.threads import limit_spinning

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [1, 3, 64, 130])
@pytest.mark.parametrize("has_bias", [False, True])
def test_equals_the_product_in_double(dtype: torch.dtype, rows: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((rows, 40), (70, 40), (70,)))
    expected = F.linear(x.double(), weight.double(), bias.double() if has_bias else None)
    with torch.inference_mode():
        found = Linear(weight, bias if has_bias else None)(x)
    assert found.dtype == dtype
    assert (found.double() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()


def test_falls_back_where_the_operators_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> torch.Tensor:
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_linear_pointwise'")

    monkeypatch.setattr(linear_module, "_packed_linear", missing)
    linear_module._can_pack.cache_clear()
    x, weight = torch.randn(2, 8), torch.randn(4, 8)
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
