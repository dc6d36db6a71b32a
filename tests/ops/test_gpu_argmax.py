"""Greedy choice in Triton: one answer for every row, in pieces or not."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nightmill_kernels.argmax import argmax
from nightmill_kernels.backend import use_triton
from nightmill_kernels.reference import argmax as reference

pytestmark = pytest.mark.usefixtures("triton_only")

NAN, INF = float("nan"), float("inf")
PIECE = 8192
"""Logits that one program looks at."""


@pytest.mark.parametrize("vocab", [1, 5, 1000, PIECE, pytest.param(PIECE + 1, marks=pytest.mark.device), 3 * PIECE - 1])
def test_takes_the_largest(device, gpu_dtype, vocab):
    torch.manual_seed(vocab)
    logits = torch.randn(7, vocab + 3).to(gpu_dtype).to(device)[:, :vocab]
    got = argmax(logits)
    assert got.dtype == torch.int32
    assert got.cpu().tolist() == reference.argmax(logits.cpu()).tolist()  # rows of 16 bits are full of ties


@pytest.mark.device
def test_ties_go_to_the_lowest_id(device, gpu_dtype):
    logits = torch.zeros(4, 3 * PIECE, dtype=gpu_dtype)
    logits[1, [3 * PIECE - 1, 2 * PIECE, PIECE + 1]] = 1.0
    logits[2] = -5.0
    logits[3, : 2 * PIECE] = -0.0
    assert argmax(logits.to(device)).tolist() == [0, PIECE + 1, 0, 0]


@pytest.mark.device
@pytest.mark.parametrize("at", [0, PIECE - 1, PIECE, PIECE + 5])
def test_rows_without_a_finite_top_are_told(device, gpu_dtype, at):
    logits = torch.full((6, PIECE + 6), -3.0, dtype=gpu_dtype)
    logits[0, at] = NAN
    logits[1] = NAN
    logits[2, at] = INF
    logits[3] = -INF
    logits[4] = -INF
    logits[4, at] = torch.finfo(gpu_dtype).min
    logits[5, at] = torch.finfo(gpu_dtype).max
    assert argmax(logits.to(device)).tolist() == [-1, -1, -1, -1, at, at]


@pytest.mark.device
def test_a_large_vocabulary(device):
    torch.manual_seed(0)
    rows = 256 if device == "cuda" else 2
    logits = torch.randn(rows, 151_936).to(torch.bfloat16 if device == "cuda" else torch.float16)
    assert torch.equal(argmax(logits.to(device)).cpu(), reference.argmax(logits))


def test_no_rows(device):
    assert argmax(torch.empty(0, 9, device=device)).shape == (0,)


VALUES = st.sampled_from([-INF, -2.5, -1.0, -1e-40, -0.0, 0.0, 1e-40, 1.0, 2.5, INF, NAN])


@settings(max_examples=40)
@given(st.lists(VALUES, min_size=1, max_size=12), st.integers(0, 2**31))
def test_any_mixture_of_values_is_what_torch_says(device, values, seed):
    """Few values, so that they tie; half of them in another piece."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.full((1, PIECE + 20), -INF)
    places = torch.randperm(40, generator=generator)[: len(values)]
    logits[0, torch.where(places < 20, places, places - 20 + PIECE)] = torch.tensor(values)
    with use_triton():
        assert argmax(logits.to(device)).tolist() == reference.argmax(logits).tolist()
