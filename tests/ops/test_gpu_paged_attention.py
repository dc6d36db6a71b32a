"""Attention as a work list in Triton: the interpreter here, a device with NIGHTMILL_TEST_DEVICE=cuda."""

import dataclasses
import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from nightmill_kernels.backend import use_triton
from nightmill_kernels.gpu import device_limits
from nightmill_kernels.metadata import AttentionWork, PrefixGroups
from nightmill_kernels.work_list import WorkCapacity, WorkList, decode_capacity, device_work, plan_attention

DEVICE = os.environ.get("NIGHTMILL_TEST_DEVICE", "cpu")
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
    return DEVICE


DTYPES = [torch.float32, torch.float16] if DEVICE == "cpu" else [torch.bfloat16]
"""The interpreter has no bf16 arithmetic, and a device takes seconds to build each kernel."""


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
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
    (64, 3, 16),  # the first four also on a device
    (128, 2, 16),
    (128, 7, 32),
    (256, 4, 64),
    (64, 1, 16),
    (64, 8, 64),
    (80, 2, 32),
    (96, 4, 16),
    (16, 1, 16),
    (48, 9, 24),
]


@pytest.mark.parametrize(
    ("head_dim", "group", "page_size"),
    [pytest.param(*shape, marks=[pytest.mark.device] if n < 4 else []) for n, shape in enumerate(SHAPES)],
)
def test_matches_the_oracle(device, dtype, head_dim, group, page_size, make_case, oracle):
    case = make_case(**MIXED, dtype=dtype, head_dim=head_dim, group=group, page_size=page_size, unowned=2)
    assert_close(case, run(case, device), oracle)


SMALL_LENS = {"query_lens": [1, 21, 1, 40, 1], "context_lens": [50, 30, 275, 40, 0]}
"""Decodes, one in two pieces; a wide item of 16 rows x 4 heads and less, and one that is not filled."""


@pytest.mark.device
@pytest.mark.parametrize(("head_dim", "group", "page_size"), [(256, 4, 16), (256, 3, 64)])
def test_the_launch_for_little_shared_memory(device, dtype, head_dim, group, page_size, monkeypatch, make_case, oracle):
    """fp32: the rows of a wide item in four parts, a row's heads in two of them with a group of 3."""
    monkeypatch.setattr(device_limits, "shared_limit", lambda _: 99 * device_limits.KIB)
    case = make_case(
        **SMALL_LENS, dtype=dtype, head_dim=head_dim, kv_heads=2, group=group, page_size=page_size, unowned=1
    )
    assert_close(case, run(case, device), oracle)


def test_parts_of_wide_items_in_a_small_grid(device, monkeypatch, make_case, oracle):
    """A captured grid with fewer programs than parts; shared prefixes, whose parts are partial results."""
    monkeypatch.setattr(device_limits, "shared_limit", lambda _: 99 * device_limits.KIB)
    lens = {"query_lens": [1] * 9, "context_lens": [100, 81, 96, 64, 90, 88, 72, 65, 20]}
    sharing = [(list(range(8)), 4)]
    case = told(make_case(**lens, dtype=torch.float32, head_dim=128, kv_heads=2, group=5, shared=sharing), sharing)
    plan = plan_of(case)
    heads, head_dim = case.q.shape[1:]
    work = device_work(
        plan,
        lambda array: torch.from_numpy(array).to(device),
        torch.full((plan.num_partials, heads, head_dim), NAN, device=device),
        torch.full((plan.num_partials, heads), NAN, device=device),
        num_programs=3,
    )
    assert work.has_wide
    assert_close(case, run(case, device, work), oracle)


@pytest.mark.device
@pytest.mark.parametrize(("head_dim", "group"), [(128, 2), (64, 3)])
def test_contexts_at_the_borders_of_blocks_pages_and_chunks(device, dtype, head_dim, group, make_case, oracle):
    contexts = [1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 511, 512, 513, 0]
    case = make_case(
        query_lens=[1] * len(contexts),
        context_lens=contexts,
        dtype=dtype,
        head_dim=head_dim,
        kv_heads=1,
        group=group,
    )
    assert_close(case, run(case, device), oracle)


@pytest.mark.device
@pytest.mark.parametrize(("window", "softcap"), [(1, None), (33, None), (300, 2.0), (None, 30.0)])
def test_windows_and_soft_caps(device, dtype, window, softcap, make_case, oracle):
    case = make_case(
        query_lens=[1, 17, 1, 70, 3, 1],
        context_lens=[50, 30, 400, 170, 64, 290],
        dtype=dtype,
        window=window,
        softcap=softcap,
        kv_heads=1,
    )
    assert_close(case, run(case, device), oracle)


@pytest.mark.device
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # numpy; 1 / (1 + inf) is what is meant
def test_scores_beyond_the_soft_cap_stay_finite(device, make_case, oracle):
    case = make_case(**MIXED, dtype=torch.float32, softcap=5.0)
    case = dataclasses.replace(case, scale=100.0)
    assert_close(case, run(case, device), oracle)


SHARED_LENS = {
    "query_lens": [1, 1, 17, 1, 1, 1, 40, 1, 1, 1],
    "context_lens": [150, 131, 30, 200, 64, 129, 40, 128, 97, 300],
}
SHARED = [([0, 3, 5, 7, 1], 8), ([8, 9], 6)]


@pytest.mark.device
@pytest.mark.parametrize(("head_dim", "group"), [(64, 3), (128, 2)])
def test_shared_prefixes_match_the_oracle(device, dtype, head_dim, group, make_case, oracle):
    case = make_case(**SHARED_LENS, dtype=dtype, head_dim=head_dim, group=group, unowned=1, shared=SHARED)
    assert_close(case, run(told(case, SHARED), device), oracle)


@pytest.mark.device
def test_many_share_a_prefix_of_several_chunks(device, dtype, make_case, oracle):
    """Two tiles of members by two chunks of the prefix, the second short; who has no key of its own; group of one."""
    lens = [272 + (extra * 37) % 70 for extra in range(24)]
    lens[5] = 272
    sharing = [(list(range(23)), 17), ([23], 3)]
    case = make_case(query_lens=[1] * 24, context_lens=lens, dtype=dtype, kv_heads=1, group=3, shared=sharing)
    assert_close(case, run(told(case, sharing), device), oracle)


def test_a_window_ignores_groups(device, make_case, oracle):
    case = told(make_case(**SHARED_LENS, dtype=torch.float32, window=40, shared=SHARED), SHARED)
    assert_close(case, run(case, device), oracle)


@pytest.mark.device
@pytest.mark.parametrize("num_programs", [1, 7])
def test_a_small_grid_takes_a_list_shorter_than_its_arrays(device, num_programs, make_case, oracle):
    """What a captured graph does: arrays of a fixed capacity with garbage behind the counts, programs that loop."""
    case = told(make_case(**SHARED_LENS, dtype=DTYPES[0], unowned=1, shared=SHARED), SHARED)
    plan = plan_of(case)
    capacity = WorkCapacity(
        items=plan.num_items + 5, rows=len(plan.rows) + 3, merges=len(plan.merges) + 4, partials=plan.num_partials + 2
    )
    padded = plan.padded(capacity)
    for name in ("items", "rows", "merges"):
        getattr(padded, name)[len(getattr(plan, name)) :] = 1 << 30
    heads, head_dim = case.q.shape[1:]
    work = device_work(
        padded,
        lambda array: torch.from_numpy(array).to(device),
        torch.full((capacity.partials, heads, head_dim), NAN, device=device),
        torch.full((capacity.partials, heads), NAN, device=device),
        num_programs=num_programs,
    )
    assert_close(case, run(case, device, work), oracle)


@pytest.mark.device
def test_decodes_alone_in_a_captured_grid(device, dtype, make_case, oracle):
    """The build without tiles; more programs than work; padding sequences."""
    case = make_case(query_lens=[1] * 5, context_lens=[300, 1, 0, 64, 0], dtype=dtype, group=2)
    plan = plan_of(case)
    padded = plan.padded(decode_capacity(5, 300))
    scratch = torch.full((len(padded.items), case.q.shape[1], case.q.shape[2]), NAN, device=device)
    work = device_work(
        padded,
        lambda array: torch.from_numpy(array).to(device),
        scratch,
        scratch[:, :, 0].contiguous(),
        num_programs=40,
    )
    assert not work.has_wide
    assert_close(case, run(case, device, work), oracle)


@pytest.mark.device
def test_a_result_does_not_depend_on_batch_mates(device, make_case):
    """Not a bit of it: cuts lie where the row's own length puts them, blocks at fixed multiples."""
    lens = [300, 17, 600, 257, 90]
    together = run(make_case(query_lens=[1] * 5, context_lens=lens, dtype=torch.float16, kv_heads=1), device)
    alone = run(make_case(query_lens=[1] * 3, context_lens=lens[:3], dtype=torch.float16, kv_heads=1), device)
    assert torch.equal(together[:3], alone)


def test_rows_of_a_fused_projection(device, make_case, oracle):
    """q as columns of a wider matrix, out as rows of another."""
    case = make_case(**MIXED, dtype=torch.float32)
    tokens, heads, head_dim = case.q.shape
    wide = torch.full((tokens, heads + 4, head_dim), NAN)
    wide[:, :heads] = case.q
    case = dataclasses.replace(case, q=wide[:, :heads])
    assert_close(case, run(case, device), oracle)


def test_a_broken_key_reaches_its_own_sequence_only(device, make_case):
    case = make_case(**MIXED, dtype=torch.float32)
    clean = run(case, device)
    case.k_pool[case.meta.page_tables[3, 1], :, 5] = NAN
    broken = run(case, device)
    assert broken[19:21].isnan().all(), "a NaN in the model must be seen, not averaged away"
    assert torch.equal(torch.cat((broken[:19], broken[21:])), torch.cat((clean[:19], clean[21:])))


@pytest.mark.device
def test_a_pool_beyond_two_billion_elements(device, make_case, oracle):
    """Offsets are computed in 64 bits. Only the pages that are used are ever touched."""
    case = make_case(query_lens=[1, 20], context_lens=[40, 30], dtype=torch.float16, head_dim=128, kv_heads=1, group=2)
    page = case.k_pool[0].numel()
    shift = (1 << 31) // page
    moved = {}
    for name in ("k_pool", "v_pool"):
        small = getattr(case, name)
        large = torch.empty((shift + len(small), *small.shape[1:]), dtype=small.dtype, device=device)
        large[0], large[shift:] = NAN, small.to(device)
        moved[name] = large
    tables = torch.where(case.meta.page_tables > 0, case.meta.page_tables + shift, 0).to(torch.int32)
    case = dataclasses.replace(case, **moved, meta=dataclasses.replace(case.meta, page_tables=tables))
    assert_close(case, run(case, device), oracle)


def test_nothing_to_do(device, make_case):
    case = make_case(query_lens=[], context_lens=[], dtype=torch.float32)
    assert run(case, device).shape == (0, 6, 64)
    case = make_case(query_lens=[1, 0, 3], context_lens=[0, 0, 0], dtype=torch.float32, unowned=2)
    assert torch.equal(run(case, device), torch.zeros(6, 6, 64))


@pytest.mark.parametrize(
    ("sharing", "message"),
    [
        ([([0, 1], 9)], "all of its pages"),
        ([([0, 2], 1)], "all of its pages"),
        ([([0, 3], 3), ([3, 5], 3)], "one group each"),
        ([([0, 4], 2)], "same first pages"),
    ],
)
def test_groups_that_cannot_be_are_refused(device, sharing, message, make_case):
    case = make_case(**SHARED_LENS, dtype=torch.float32, shared=[([0, 1, 3, 5, 7], 8)])
    with pytest.raises(ValueError, match=message):
        run(told(case, sharing), device)


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_step_matches_the_oracle(device, make_case, oracle, data):
    page_size = data.draw(st.sampled_from([16, 32, 64]))
    sequences = data.draw(st.integers(1, 6))
    sharing = []
    left = data.draw(st.permutations(range(sequences)))
    while left and data.draw(st.booleans()):
        size = data.draw(st.integers(1, len(left)))
        sharing.append((sorted(left[:size]), data.draw(st.integers(0, 320 // page_size))))
        left = left[size:]
    least = {s: count * page_size for ids, count in sharing for s in ids}
    case = make_case(
        query_lens=[1 if s in least else data.draw(st.integers(0, 30)) for s in range(sequences)],
        context_lens=[least.get(s, 0) + data.draw(st.integers(0 if least.get(s) else 1, 70)) for s in range(sequences)],
        dtype=torch.float32,
        head_dim=data.draw(st.sampled_from([16, 48, 64])),
        kv_heads=data.draw(st.integers(1, 2)),
        group=data.draw(st.sampled_from([1, 2, 3, 5, 8, 17])),
        page_size=page_size,
        window=data.draw(st.sampled_from([None, 1, 40])),
        softcap=data.draw(st.sampled_from([None, 3.0])),
        unowned=data.draw(st.integers(0, 2)),
        shared=sharing,
    )
    assert_close(case, run(told(case, sharing), device), oracle)


def plan_of(case) -> WorkList:
    """The case's list, planned as an engine would."""
    meta, groups = case.meta, case.meta.groups
    return plan_attention(
        meta.query_starts.numpy(),
        meta.context_lens.numpy(),
        None if groups is None else StepGroups(*(getattr(groups, f).numpy() for f in StepGroups.__slots__)),
        num_tokens=len(case.q),
        group_size=case.q.shape[1] // case.k_pool.shape[1],
        page_size=case.k_pool.shape[2],
        table_width=meta.page_tables.shape[1],
        window=case.window,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class StepGroups:
    starts: NDArray[np.int32]
    sequences: NDArray[np.int32]
    num_pages: NDArray[np.int32]
