"""Draws in Triton against the reference on the CPU: the same bits of noise, the same ids."""

import math
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ops.test_draw import KINDS, logits_of, reference, rows_of
from torch import Tensor

from nightmill_kernels.draw import DrawRows, draw
from nightmill_kernels.reference import elementary
from nightmill_kernels.reference.philox import MAX_GUMBEL, gumbel_row

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_only")

LONG = pytest.mark.long  # in the interpreter; those that are also `device` take milliseconds there
PLAIN = [kind for kind in KINDS if kind[2] == 0 and kind[3] == 1.0]
EDGES = [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, -(2**63), -1]  # the last two: seeds 2^63 and 2^64 - 1


def drawn(logits: Tensor, rows: DrawRows, device: str, *, has_filters: bool = True) -> list[int]:
    return draw(guarded(logits, device), moved(rows, device), has_filters=has_filters).tolist()


def guarded(logits: Tensor, device: str) -> Tensor:
    """Rows of a wider tensor whose other elements are NaN."""
    wide = torch.full((len(logits), logits.shape[1] + 7), math.nan, dtype=logits.dtype, device=device)
    wide[:, : logits.shape[1]] = logits
    return wide[:, : logits.shape[1]]


def moved(rows: DrawRows, device: str) -> DrawRows:
    return DrawRows(**{field.name: getattr(rows, field.name).to(device) for field in fields(DrawRows)})


def edge_rows(count: int, kinds=((1.0, 0.0, 0, 1.0),)) -> DrawRows:
    rows = rows_of(count, kinds=list(kinds))
    rows.seed[: len(EDGES)] = torch.tensor(EDGES)[:count]
    rows.position[: len(EDGES)] = torch.tensor([0, 2**32 - 1, 2**32, 2**40, 5, 7, 2**63 - 1, 2**33])[:count]
    return rows


@pytest.fixture
def probe():
    """Imported here: the module needs triton."""
    from tests.ops import elementary_probe

    return elementary_probe


@pytest.mark.device
def test_noise_has_the_references_bits(device, probe):
    rows, vocab = edge_rows(16), 1024
    found = probe.gumbel_rows(rows.seed.to(device), rows.position.to(device), vocab).cpu()
    expected = gumbel_row(rows.seed, rows.position, vocab)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


@pytest.mark.device
def test_noise_of_every_kind_of_word_has_the_references_bits(device, probe):
    """Words at the ends, where the logarithms are of numbers near 0 and 1, and some from all over."""
    generator = torch.Generator().manual_seed(0)
    near = torch.arange(512)
    words = torch.cat(
        (near, 2**32 - 1 - near, 2**31 + near, torch.randint(0, 2**32, (8192 - 1536,), generator=generator))
    )
    found = probe.gumbel_of(words.to(torch.int32).to(device)).cpu()
    expected = reference_gumbel(words)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
    assert expected.max() <= MAX_GUMBEL


@pytest.mark.device
def test_logarithm_and_weight_have_the_references_bits(device, probe):
    x = torch.cat((torch.logspace(-37, 38, 4096), torch.linspace(0.5, 2, 4094), torch.tensor([1e-40, 1.0])))
    found = probe.log_of(x.to(device)).cpu()
    assert torch.equal(found.view(torch.int32), elementary.log(x).view(torch.int32))
    down = torch.cat((torch.linspace(-45, 0, 8189), torch.tensor([-0.0, -1e30, -math.inf])))
    assert torch.equal(probe.weight_of(down.to(device)).cpu(), elementary.weight(down))


def reference_gumbel(words: Tensor) -> Tensor:
    from nightmill_kernels.reference.philox import _gumbel

    return _gumbel(words)


@pytest.mark.device
@pytest.mark.parametrize("vocab", [3, 131, 1300])
def test_logits_that_level_the_noise_out(device, vocab):
    """A last bit anywhere decides who wins, and every token is one that may win."""
    rows = edge_rows(12)
    noise = gumbel_row(rows.seed, rows.position, vocab)
    logits = noise.amax(dim=-1, keepdim=True) - noise
    assert drawn(logits, rows, device, has_filters=False) == reference(logits, rows).tolist()


@pytest.mark.device
@pytest.mark.parametrize("margin", [1e-5, 0.005, -1e-5])
def test_a_narrow_winner_alone_in_its_tile_is_found(device, margin):
    """Less likely than the first by nearly all that its noise is better: where a screen that is too strict shows."""
    rows = edge_rows(12)
    noise = gumbel_row(rows.seed, rows.position, 1024)
    best, other = noise[:, 512:].max(dim=-1)
    logits = torch.full((12, 1024), -math.inf)
    logits[:, 3] = 0.0
    logits[torch.arange(12), 512 + other] = noise[:, 3] - best + margin
    expected = reference(logits, rows).tolist()
    assert expected == ([3] * 12 if margin < 0 else (512 + other).tolist())
    assert drawn(logits, rows, device, has_filters=False) == expected


@pytest.mark.device
def test_noise_of_one_in_a_hundred_million_wins(device):
    """No tile may be passed over for lying 18 below the best; of 105 million words this is the luckiest."""
    rows = rows_of(1, kinds=[(1.0, 0.0, 0, 1.0)])
    rows.seed[0], rows.position[0], lucky = 296, 0, 186_886
    noise = gumbel_row(rows.seed, rows.position, 2**18)[0]
    assert noise[lucky] > 18.4
    logits = torch.full((1, 2**18), -math.inf)
    logits[0, 3] = 0.0
    logits[0, lucky] = noise[3] - noise[lucky] + 1e-5
    logits[0, lucky - 1024] = logits[0, lucky] + 1  # the best of its piece, which is looked at first
    assert reference(logits, rows).tolist() == [lucky]
    assert drawn(logits, rows, device, has_filters=False) == [lucky]


@pytest.mark.device
@pytest.mark.parametrize(("vocab", "scale"), [(2, 0.0), (5, 3.0), (513, 0.1), (1537, 3.0), (1025, 40.0)])
def test_ids_are_the_references(device, gpu_dtype, vocab, scale):
    logits = logits_of(len(PLAIN), vocab, scale=scale, seed=vocab, dtype=gpu_dtype)
    rows = rows_of(len(PLAIN), seed=vocab, kinds=PLAIN)
    assert drawn(logits, rows, device, has_filters=False) == reference(logits, rows).tolist()


@pytest.mark.device
@pytest.mark.parametrize(
    ("vocab", "scale"),
    [(9001, 3.0), *(pytest.param(*case, marks=LONG) for case in ((2, 0.0), (65, 3.0), (1100, 0.0), (2049, 20.0)))],
)
def test_filters_keep_what_the_references_keep(device, gpu_dtype, vocab, scale):
    logits = logits_of(16, vocab, scale=scale, seed=vocab, dtype=gpu_dtype)
    for start in range(0, vocab - 2047, 2048):  # of more than 8,192 logits, these share their lanes in the survey
        logits[:, start + 1024 : start + 2048] = logits[:, start : start + 1024] - 0.01
    rows = rows_of(16, seed=vocab)
    assert cut_of(logits, rows, device) == reference_cut(logits, rows).tolist()


@pytest.mark.device
def test_ids_of_filtered_rows_are_the_references(device):
    logits, rows = logits_of(16, 600, scale=3.0), rows_of(16)
    assert drawn(logits, rows, device) == reference(logits, rows).tolist()


@pytest.mark.device
def test_ids_of_a_real_vocabulary(device):
    """Many pieces of many tiles: as a model's logits fall, a few likely tokens above a long tail."""
    if device == "cpu":
        pytest.skip("minutes in the interpreter")
    generator = torch.Generator().manual_seed(1)
    noise = torch.rand(48, 151_936, generator=generator).clamp_(1e-9, 1 - 1e-7)
    logits = noise.log().neg().log().neg().mul_(2.0).bfloat16()
    for kinds, has_filters in ((PLAIN, False), (KINDS, True)):
        rows = rows_of(48, kinds=kinds)
        assert drawn(logits, rows, device, has_filters=has_filters) == reference(logits, rows).tolist()
    flat = torch.randn(16, 151_936, generator=generator).mul_(0.1).bfloat16()
    assert drawn(flat, rows_of(16), device) == reference(flat, rows_of(16)).tolist()


@pytest.mark.parametrize("capacity", [16, pytest.param(1, marks=LONG), pytest.param(256, marks=LONG)])
def test_more_candidates_than_fit_are_searched_in_the_whole_row(device, monkeypatch, capacity):
    from nightmill_kernels.gpu import cut

    monkeypatch.setattr(cut, "CAPACITY", capacity)
    kinds = [kind for kind in KINDS if kind not in PLAIN]
    logits, rows = logits_of(9, 1100, scale=2.0), rows_of(9, kinds=kinds)
    assert cut_of(logits, rows, device) == reference_cut(logits, rows).tolist()


def test_weight_that_lies_far_from_the_largest_is_found(device):
    """A token, and 600 others 9 below it that hold the rest: more than NEAR away."""
    logits = torch.full((8, 900), -60.0)
    logits[:, 5] = 0.0
    logits[:, 100:700] = -9.0 - torch.arange(600) * 1e-3
    kinds = [(1.0, 0.0, 0, p) for p in (0.5, 0.92, 0.95, 0.97, 0.999, 0.99999)] + [
        (1.0, 1e-4, 0, 0.96),
        (3.0, 0.0, 0, 0.9),
    ]
    rows = rows_of(8, kinds=kinds)
    assert cut_of(logits, rows, device) == reference_cut(logits, rows).tolist()


@pytest.mark.device
@pytest.mark.parametrize("step", [1.0, pytest.param(0.125, marks=LONG)])
def test_cuts_are_the_references_where_a_lot_ties(device, step):
    logits = (logits_of(16, 600, scale=3.0) / step).round() * step
    logits[3] = torch.where(logits[3].abs() < 2, torch.tensor(-0.0), logits[3])  # both zeros
    logits[10, ::2], logits[10, 1::2] = 0.0, -0.0
    logits[10, 7] = 8.0  # candidates from 0.0 on
    rows = rows_of(16)
    assert cut_of(logits, rows, device) == reference_cut(logits, rows).tolist()


def cut_of(logits: Tensor, rows: DrawRows, device: str) -> list[float]:
    """What the kernels cut at; -inf where temperature 0 needs no cut."""
    from nightmill_kernels.gpu import cut as gpu
    from nightmill_kernels.gpu import draw as gpu_draw

    there = guarded(logits, device)
    tops, _, lanes = gpu_draw.survey(there, keep_lanes=True)
    cut = gpu.cuts(there, moved(rows, device), tops, lanes).cpu()
    return cut.masked_fill_(rows.temperature == 0, -math.inf).tolist()


def reference_cut(logits: Tensor, rows: DrawRows) -> Tensor:
    from nightmill_kernels.reference.draw import _cut

    temperature = torch.where(rows.temperature > 0, rows.temperature, 1.0)
    return _cut(logits.float() / temperature[:, None], rows).masked_fill_(rows.temperature == 0, -math.inf)


@pytest.mark.device
@pytest.mark.parametrize("has_filters", [False, True])
def test_a_row_that_is_not_finite_fails_alone(device, has_filters):
    kinds = KINDS if has_filters else PLAIN
    logits, rows = logits_of(16, 700, scale=1.0), rows_of(16, kinds=kinds)
    expected = reference(logits, rows).tolist()
    for row, at, bad in (
        (0, 0, math.nan),
        (5, 511, math.inf),
        (8, 699, math.nan),
        (9, 512, math.inf),
        (13, 3, math.nan),
    ):
        logits[row, at] = bad
        expected[row] = -1
    logits[11], logits[2] = -math.inf, -math.inf
    expected[11] = expected[2] = -1
    assert drawn(logits, rows, device, has_filters=has_filters) == expected


@pytest.mark.device
def test_minus_infinity_is_never_drawn(device):
    logits, rows = logits_of(6, 600, scale=1.0), rows_of(6, kinds=[*KINDS[:2], *KINDS[6:9], KINDS[10]])
    allowed = torch.zeros(600, dtype=torch.bool)
    allowed[[3, 64, 599]] = True
    logits = logits.masked_fill(~allowed, -math.inf)
    found = drawn(logits, rows, device)
    assert {*found} <= {3, 64, 599}
    assert found == reference(logits, rows).tolist()


def test_temperatures_at_the_ends_of_float32(device):
    kinds = [(t, 0.0, 0, p) for t in (1e-40, 1e-5, 1e30, 3e38) for p in (1.0, 0.9)]
    logits, rows = logits_of(8, 520, scale=2.0), rows_of(8, kinds=kinds)
    logits[:2] -= logits[:2].amax(-1, keepdim=True)  # of 1e-40, all but 0 is infinite
    assert drawn(logits, rows, device) == reference(logits, rows).tolist()
    huge = torch.full((1, 9), 1e38)
    assert drawn(huge, rows_of(1, kinds=[(1e-5, 0.0, 0, 1.0)]), device) == [-1]


def test_bits_do_not_depend_on_the_other_rows(device):
    logits, rows = logits_of(4, 600, scale=2.0), rows_of(4, kinds=[KINDS[1], KINDS[7], KINDS[10], KINDS[14]])
    whole = drawn(logits, rows, device)
    for i in range(4):
        assert drawn(logits[i : i + 1], rows.at(torch.tensor([i])), device) == whole[i : i + 1]


def test_one_token(device):
    logits, rows = torch.randn(16, 1), rows_of(16)
    assert drawn(logits, rows, device) == [0] * 16


def test_no_rows(device):
    assert drawn(torch.empty(0, 7), rows_of(0), device) == []


@pytest.mark.parametrize("examples", [8, pytest.param(60, marks=LONG)])
def test_any_rows(device, examples):
    check = settings(max_examples=examples)(given(data=st.data())(check_rows))
    check(device)


def check_rows(device, data):
    vocab = data.draw(st.sampled_from([1, 7, 64, 100, 515, 1025]))
    count = data.draw(st.integers(1, 3))
    scale, seed = data.draw(st.sampled_from([0.0, 1.0, 8.0, 1e4])), data.draw(st.integers(0, 99))
    logits = logits_of(count, vocab, scale=scale, seed=seed)
    step = data.draw(st.sampled_from([None, 0.125, 1.0]))
    if step is not None:
        logits = (logits / step).round() * step
    if data.draw(st.booleans()):
        dropped = torch.rand(logits.shape, generator=torch.Generator().manual_seed(1)) < 0.7
        logits = logits.masked_fill(dropped, -torch.inf)
    kind = st.tuples(
        st.sampled_from([0.0, 1e-4, 0.7, 1.0, 5.0]),
        st.sampled_from([0.0, 0.01, 0.5, 1.0]),
        st.integers(0, vocab + 2),
        st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0]),
    )
    rows = rows_of(count, seed=seed, kinds=data.draw(st.lists(kind, min_size=1, max_size=3)))
    assert drawn(logits, rows, device) == reference(logits, rows).tolist()


def test_nothing_is_fused_where_each_operation_is_rounded(tmp_path):
    """In the PTX for an H200: neither a fused multiply-add nor an approximate division in what must be exact."""
    code = Path(__file__).with_name("fused_kernels.py")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(code)]
    ended = subprocess.run(
        command, env=env | {"TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    *exact, fusing = [line.split() for line in ended.stdout.splitlines()]
    # The one approximate division is in the contest's screening, which allows for it.
    assert sorted(map(tuple, exact)) == [("cut", "0", "0")] * 3 + [("draw", "0", "1")] * 2
    assert int(fusing[1]) > 50, "a build that may fuse does: the count can tell"
