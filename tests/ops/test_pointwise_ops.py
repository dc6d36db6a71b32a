"""Norms, rotary embedding, pool writes, gated activations and argmax: every implementation against fp64."""

import pytest
import torch

from nightmill_kernels.argmax import argmax
from nightmill_kernels.gated_mul import gelu_mul, silu_mul
from nightmill_kernels.layout import pages_paired
from nightmill_kernels.reference import store_kv as reference
from nightmill_kernels.rms_norm import add_rms_norm, rms_norm
from nightmill_kernels.rope import rope, rope_store_kv
from nightmill_kernels.store_kv import store_kv

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8}
"""Of the value: a few fp32 roundings; half a unit in the last place of a bf16 result."""

NAN, INF = float("nan"), float("inf")


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def assert_close(got, want, scale=1.0):
    """`scale`: magnitude of the terms that were summed, where they may cancel."""
    allowed = TOLERANCE[got.dtype] * (want.abs() + 1e-30) + 2e-6 * scale
    assert ((got.double() - want).abs() <= allowed).all()


def poisoned(shape, dtype):
    return torch.full(shape, NAN, dtype=dtype)


# ---------------------------------------------------------------- RMS norm


def norm_oracle(x, weight, offset):
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (weight.double() + offset)


@pytest.mark.parametrize("size", [1, 7, 16, 17, 64, 100, 576])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(isa, dtype, size, offset):
    torch.manual_seed(size)
    x, weight = torch.randn(5, size).to(dtype), torch.randn(size).to(dtype)
    want = norm_oracle(x, weight, offset)
    out = poisoned(x.shape, dtype)
    assert rms_norm(x, weight, 1e-5, weight_offset=offset, out=out) is out
    assert_close(out, want)
    assert torch.equal(rms_norm(x, weight, 1e-5, weight_offset=offset), out)
    assert torch.equal(rms_norm(x, weight, 1e-5, weight_offset=offset, out=x), out)


def test_rms_norm_of_heads_in_a_fused_projection(isa, dtype):
    fused, weight = torch.randn(6, 9, 64).to(dtype), torch.randn(64).to(dtype)
    before, heads = fused.clone(), fused[:, 2:5]
    rms_norm(heads, weight, 1e-5, out=heads)
    assert_close(fused[:, 2:5], norm_oracle(before[:, 2:5], weight, 0.0))
    assert torch.equal(fused[:, :2], before[:, :2])
    assert torch.equal(fused[:, 5:], before[:, 5:])


@pytest.mark.parametrize("size", [7, 64, 576])
def test_add_rms_norm_normalises_the_rounded_sum(isa, dtype, size):
    x, residual, weight = (torch.randn(shape).to(dtype) for shape in ((3, size), (3, size), (size,)))
    total = x + residual
    out, carried = add_rms_norm(x, residual, weight, 1e-5)
    assert carried is residual
    assert torch.equal(carried, total)
    assert_close(out, norm_oracle(total, weight, 0.0))


def test_rms_norm_passes_nan_on(isa, dtype):
    x = torch.ones(2, 20, dtype=dtype)
    x[1, 3] = NAN
    out = rms_norm(x, torch.ones(20, dtype=dtype), 1e-5)
    assert out[0].isfinite().all()
    assert out[1].isnan().all()


# ---------------------------------------------------------------- RoPE and the pool


def rotation(length, rot):
    angle = torch.arange(length)[:, None] / 100.0 ** (torch.arange(rot // 2) / (rot // 2))
    return torch.cat((angle.cos(), angle.sin()), dim=-1).float()


def rope_oracle(x, positions, cos_sin):
    half = cos_sin.shape[1] // 2
    cos, sin = (part[positions.long()].double()[:, None] for part in (cos_sin[:, :half], cos_sin[:, half:]))
    first, second, rest = x.double().split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


@pytest.mark.parametrize(("head_dim", "rot"), [(64, 64), (64, 32), (80, 20), (96, 96), (128, 128), (10, 6)])
@pytest.mark.parametrize("wide", [False, True])
def test_rope(isa, dtype, head_dim, rot, wide):
    torch.manual_seed(rot)
    cos_sin = rotation(40, rot)
    positions = torch.tensor([0, 39, 5, 5], dtype=torch.int64 if wide else torch.int32)
    fused = torch.randn(4, 5, head_dim).to(dtype)
    before, q, k = fused.clone(), fused[:, :3], fused[:, 3:4]
    rope(q, k, positions, cos_sin)
    assert_close(fused[:, :4], rope_oracle(before[:, :4], positions, cos_sin), scale=4.0)
    assert torch.equal(fused[:, 4], before[:, 4])


def test_store_writes_its_slots_and_nothing_else(isa, dtype):
    fused = torch.randn(5, 7, 32).to(dtype)
    k, v = fused[:, :2], fused[:, 3:5]
    pools = poisoned((2, 6, 2, 8, 32), dtype)
    slots = torch.tensor([17, -1, 8, 47, -5])
    store_kv(k, v, pools[0], pools[1], slots)
    for token, slot in ((0, 17), (2, 8), (3, 47)):
        assert torch.equal(pools[0, slot // 8, :, slot % 8], k[token])
        assert torch.equal(pools[1, slot // 8, :, slot % 8], v[token])
    assert int(pools[0].isfinite().sum()) == 3 * 2 * 32
    assert int(pools[1].isfinite().sum()) == 3 * 2 * 32


@pytest.mark.parametrize(("page_size", "head_dim"), [(16, 32), (32, 64), (48, 96), (64, 256), (16, 80), (24, 64)])
def test_every_place_of_a_page_is_written_once(isa, dtype, page_size, head_dim):
    """Whatever a page looks like inside: as many elements as were stored, each of them once, in its page and head."""
    heads, places = 3, torch.randperm(page_size)
    k = torch.arange(page_size * heads * head_dim).remainder(256).view(page_size, heads, head_dim).to(dtype)
    pools = poisoned((2, 3, heads, page_size, head_dim), dtype)
    store_kv(k, k + 1, pools[0], pools[1], page_size + places)
    assert pools[:, [0, 2]].isnan().all()
    for pool, stored in ((pools[0], k), (pools[1], k + 1)):
        for head in range(heads):
            assert torch.equal(pool[1, head].flatten().sort().values, stored[:, head].flatten().sort().values)


@pytest.mark.parametrize(("page_size", "head_dim"), [(16, 32), (32, 64), (48, 96), (16, 80), (24, 64)])
def test_the_reference_keeps_pages_as_the_library_does(c_isa, dtype, page_size, head_dim):
    k, v = torch.randn(2, 7, 2, head_dim).to(dtype)
    slots = torch.tensor([page_size, page_size + 1, 3 * page_size - 1, -1, 5, 0, 2 * page_size + 14])
    library, plain = (poisoned((2, 4, 2, page_size, head_dim), dtype) for _ in range(2))
    store_kv(k, v, library[0], library[1], slots)
    reference.store_kv(k, v, plain[0], plain[1], slots, paired=pages_paired(plain[0]))
    assert torch.equal(library.nan_to_num(1e9), plain.nan_to_num(1e9))


def test_only_one_instruction_set_pairs(c_isa, dtype):
    pool = torch.empty(1, 2, 32, 64, dtype=dtype)
    assert pages_paired(pool) == (c_isa in ("amx_bf16", "avx512_bf16") and dtype == torch.bfloat16)
    assert not pages_paired(torch.empty(1, 2, 24, 64, dtype=dtype))
    assert not pages_paired(torch.empty(1, 2, 16, 80, dtype=dtype))


def test_store_into_interleaved_pools(isa, dtype):
    k, v = torch.randn(1, 2, 16).to(dtype), torch.randn(1, 2, 16).to(dtype)
    pages = poisoned((4, 2, 2, 8, 16), dtype)
    store_kv(k, v, pages[:, 0], pages[:, 1], torch.tensor([19]))
    assert torch.equal(pages[2, 0, :, 3], k[0])
    assert torch.equal(pages[2, 1, :, 3], v[0])


def test_rope_store_kv_is_rope_then_store(isa, dtype):
    torch.manual_seed(0)
    cos_sin, positions = rotation(50, 64), torch.tensor([3, 49, 0], dtype=torch.int32)
    q, k, v = torch.randn(3, 6, 64).to(dtype), torch.randn(3, 2, 64).to(dtype), torch.randn(3, 2, 64).to(dtype)
    apart_q, apart_k, apart = q.clone(), k.clone(), poisoned((2, 3, 2, 16, 64), dtype)
    together = apart.clone()
    slots = torch.tensor([20, -1, 40])
    rope(apart_q, apart_k, positions, cos_sin)
    store_kv(apart_k, v, apart[0], apart[1], slots)
    rope_store_kv(q, k, v, positions, cos_sin, together[0], together[1], slots)
    assert torch.equal(q, apart_q)
    assert torch.equal(k, apart_k)
    assert torch.equal(together.nan_to_num(7.0), apart.nan_to_num(7.0))


def test_refuses_slots_and_positions_outside(c_isa):
    k = torch.randn(2, 1, 16)
    pool = torch.zeros(3, 1, 8, 16)
    with pytest.raises(ValueError, match="slot"):
        store_kv(k, k, pool, pool.clone(), torch.tensor([0, 24]))
    for bad in (-1, 10):
        with pytest.raises(ValueError, match="position"):
            rope(k, k.clone(), torch.tensor([0, bad]), rotation(10, 16))
    assert (pool == 0).all()


# ---------------------------------------------------------------- gated activations


@pytest.mark.parametrize("size", [1, 15, 16, 100, 1536])
@pytest.mark.parametrize("name", ["silu", "gelu"])
def test_gated_mul(isa, dtype, size, name):
    torch.manual_seed(size)
    wide = (torch.randn(3, 2 * size + 5) * 4).to(dtype)
    x = wide[:, : 2 * size]
    gate, up = x.double().chunk(2, dim=-1)
    if name == "silu":
        got, want = silu_mul(x), torch.nn.functional.silu(gate) * up
    else:
        got, want = gelu_mul(x), torch.nn.functional.gelu(gate, approximate="tanh") * up
    assert got.shape == (3, size)
    assert_close(got, want, scale=4.0)


def test_gated_mul_of_extremes(isa, dtype):
    gate = torch.tensor([[-1e30, -200.0, -90.0, 0.0, 90.0, 200.0, 1e30, NAN]]).to(dtype)
    x = torch.cat((gate, torch.ones_like(gate)), dim=-1)
    for got in (silu_mul(x), gelu_mul(x)):
        assert torch.allclose(got[0, :3].float(), torch.zeros(3), atol=1e-6)
        assert torch.equal(got[0, 3:7], gate[0, 3:7])
        assert got[0, 7].isnan()


# ---------------------------------------------------------------- argmax


@pytest.mark.parametrize("vocab", [1, 5, 16, 1000, 1024, 1025, 49152])
def test_argmax(isa, dtype, vocab):
    torch.manual_seed(vocab)
    logits = torch.randn(7, vocab + 3).to(dtype)[:, :vocab]
    got = argmax(logits)
    assert got.dtype == torch.int32
    top = logits.double().max(-1, keepdim=True).values
    want = [int((logits[row].double() == top[row]).nonzero()[0]) for row in range(7)]  # bf16 rows are full of ties
    assert got.tolist() == want


def test_argmax_ties_go_to_the_lowest_id(isa, dtype):
    logits = torch.zeros(3, 3000, dtype=dtype)
    logits[1, [2999, 1500, 1024]] = 1.0
    logits[2] = -5.0
    assert argmax(logits).tolist() == [0, 1024, 0]


def test_argmax_tells_rows_without_a_finite_top(isa, dtype):
    logits = torch.zeros(6, 2050, dtype=dtype)
    logits[0, 2049] = NAN
    logits[1, 0] = NAN
    logits[2, 5] = INF
    logits[3] = -INF
    logits[4] = -INF
    logits[4, 2048] = -3.0
    assert argmax(logits).tolist() == [-1, -1, -1, -1, 2048, 0]


# ---------------------------------------------------------------- layouts and threads


def test_bits_do_not_depend_on_threads(c_isa, dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(300, 576).to(dtype), torch.randn(576).to(dtype)
    gate_up, logits = torch.randn(300, 3072).to(dtype), torch.randn(50, 5000).to(dtype)
    before, runs = torch.get_num_threads(), []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        runs.append((rms_norm(x, weight, 1e-5), silu_mul(gate_up), argmax(logits)))
    torch.set_num_threads(before)
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


def test_refuses_layouts_it_cannot_take(isa):
    x = torch.randn(4, 8)
    with pytest.raises(ValueError, match="weight"):
        rms_norm(x, torch.ones(7), 1e-5)
    with pytest.raises(ValueError, match="contiguous"):
        rms_norm(x.t(), torch.ones(4), 1e-5)
    with pytest.raises(ValueError, match="residual"):
        add_rms_norm(x, torch.randn(3, 8), torch.ones(8), 1e-5)
    with pytest.raises(ValueError, match="even"):
        rope(torch.randn(2, 1, 8), torch.randn(2, 1, 8), torch.zeros(2, dtype=torch.int32), torch.randn(4, 7))
    with pytest.raises(ValueError, match="int64"):
        store_kv(
            *(torch.randn(1, 1, 8) for _ in range(2)), *(torch.zeros(2, 1, 4, 8) for _ in range(2)), torch.zeros(1)
        )
    with pytest.raises(ValueError, match="gate_up"):
        silu_mul(torch.randn(2, 7))
    with pytest.raises(ValueError, match="logits"):
        argmax(torch.randn(2, 0))


def test_no_tokens_at_all(isa, dtype):
    assert rms_norm(torch.empty(0, 8, dtype=dtype), torch.ones(8, dtype=dtype), 1e-5).shape == (0, 8)
    assert silu_mul(torch.empty(0, 8, dtype=dtype)).shape == (0, 4)
    assert argmax(torch.empty(0, 8, dtype=dtype)).shape == (0,)
