"""Rows moved to the front, in place."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nightmill_kernels.backend import use_isa
from nightmill_kernels.cpu.isa import available_isas
from nightmill_kernels.keep_rows import keep_rows


def _index(*rows: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


@given(st.data())
def test_moves_the_rows_and_leaves_what_is_beside_them(data: st.DataObject) -> None:
    isa = data.draw(st.sampled_from([*available_isas(), "reference"]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    rows, heads, dim = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 40))
    whole = torch.randn(rows, heads + 2, dim).to(dtype)  # as q lies in the projection that it is a part of
    kept = sorted(data.draw(st.sets(st.integers(0, rows - 1))))
    x = whole.clone()
    view = x[:, :heads]
    if data.draw(st.booleans()):
        x = x.flatten(1)
        view = x
    expected = view.clone()[kept]
    beside = whole[:, heads:].clone()
    with use_isa(isa):
        got = keep_rows(view, _index(*kept))
    assert got.shape == expected.shape
    assert torch.equal(got, expected)
    if x.dim() == 3:
        assert torch.equal(x[:, heads:], beside)


@pytest.mark.parametrize("rows", [(1, 0), (2, 2), (0, 4), (-1, 2)], ids=str)
def test_refuses_rows_that_do_not_ascend_within_those_there_are(rows: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must ascend within those given"):
        keep_rows(torch.zeros(4, 3), _index(*rows))


def test_refuses_what_it_cannot_take() -> None:
    with pytest.raises(ValueError, match="cannot keep"):
        keep_rows(torch.zeros(2, 3), _index(0, 1, 2))
    with pytest.raises(ValueError, match="contiguous int32"):
        keep_rows(torch.zeros(4, 3), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="in one piece"):
        keep_rows(torch.zeros(3, 4).t(), _index(0, 1))
