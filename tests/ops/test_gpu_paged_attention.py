"""Attention as a work list in Triton: the interpreter here, a device with NIGHTMILL_TEST_DEVICE=cuda."""

import dataclasses
import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from nightmill_kernels.backend import use_triton
from nightmill_kernels.metadata import AttentionWork, PrefixGroups

pytest.importorskip("triton")

NAN = float("nan")
FP32_TOLERANCE = 1e-5
"""Outputs are means of N(0, 1) values: a few dozen roundings of 2^-24 each, ten times over."""

HALF_ULP = {torch.float16: 2**-11, torch.bfloat16: 2**-8}
"""Relative rounding of an output, and of each weight that meets V."""

SLACK = 1e-4
"""What fp32 scores of rounded inputs add: far below one rounding of the output."""

MIXED = {"query_lens": [1, 17, 1, 2, 40, 1, 1], "context_lens": [50, 30, 1, 131, 40, 0, 64]}


@pytest.fixture(autouse=True)
def _triton() -> Iterator[None]:
    with use_triton():
        yield


@pytest.fixture
def device() -> str:
    return os.environ.get("NIGHTMILL_TEST_DEVICE", "cpu")


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
def dtype(request: pytest.FixtureRequest, device: str) -> torch.dtype:
    if request.param == torch.bfloat16 and device == "cpu":
        pytest.skip("the interpreter has no bf16 arithmetic")
    return request.param


def run(case, device: str, work: AttentionWork | None = None) -> Tensor:
    """The case on the device, into an output full of NaN; back on the host."""
    meta = case.meta
    groups = None if meta.groups is None else to_device(meta.groups, device)
    meta = to_device(dataclasses.replace(meta, groups=None), device)
    meta = dataclasses.replace(meta, groups=groups, work={} if work is None else {case.window: work})
    tensors = {name: getattr(case, name).to(device) for name in ("q", "k_pool", "v_pool")}
    return dataclasses.replace(case, **tensors, meta=meta).run().cpu()


def to_device(record, device: str):
    moved = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    return type(record)(**{k: v.to(device) if isinstance(v, Tensor) else v for k, v in moved.items()})


def assert_close(case, out: Tensor, oracle) -> None:
    want, spread = oracle(case)
    error = (out.double() - want).abs()
    if out.dtype == torch.float32:
        allowed = torch.full_like(error, FP32_TOLERANCE)
    else:
        allowed = HALF_ULP[out.dtype] * (want.abs() + spread) + SLACK
    assert torch.isfinite(out).all(), "something that is nobody's reached an output, or an output was not written"
    assert (error <= allowed).all(), f"worst {float((error / allowed).max()):.2f} times the tolerance"


def told(case, sharing: list[tuple[list[int], int]]):
    """The case with its sharing told, sequences in an order of their own."""
    members = [torch.tensor(ids[::-1], dtype=torch.int32) for ids, _ in sharing]
    groups = PrefixGroups(
        starts=torch.tensor([0, *(len(ids) for ids, _ in sharing)], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        sequences=torch.cat(members) if members else torch.empty(0, dtype=torch.int32),
        num_pages=torch.tensor([count for _, count in sharing], dtype=torch.int32),
    )
    return dataclasses.replace(case, meta=dataclasses.replace(case.meta, groups=groups))


SHAPES = [
    (64, 1, 16),
    (64, 3, 16),
    (64, 8, 64),
    (80, 2, 32),
    (96, 4, 16),
    (128, 7, 32),
    (256, 4, 64),
    (16, 1, 16),
    (48, 9, 24),
    (128, 2, 16),
]


@pytest.mark.parametrize(("head_dim", "group", "page_size"), SHAPES)
def test_matches_the_oracle(device, dtype, head_dim, group, page_size, make_case, oracle):
    case = make_case(**MIXED, dtype=dtype, head_dim=head_dim, group=group, page_size=page_size, unowned=2)
    assert_close(case, run(case, device), oracle)
