"""Head norms, rotation and the page pool in one Triton launch, and in parts, against fp64 and the reference."""

import pytest
import torch

from nightmill_kernels.backend import use_isa, use_triton
from nightmill_kernels.qk_norm_rope import HeadNorms, qk_norm_rope
from nightmill_kernels.reference import qk_norm_rope as reference
from nightmill_kernels.rms_norm import rms_norm
from nightmill_kernels.rope import rope, rope_store_kv
from nightmill_kernels.store_kv import store_kv

HALF_ULP = {torch.float32: 1e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}
"""Of a value: one rounding; in fp32 a few."""

EPS = 1e-6
PAGE, NUM_PAGES, MAX_LEN = 4, 9, 50
NAN = float("nan")
SLOTS = [17, -1, 8, 35, -7, 0]
POSITIONS = [0, 49, 5, 5, 0, 31]
SHAPES = [  # heads, KV heads, head size, how much of it is rotated
    (4, 2, 64, 64),
    pytest.param((9, 3, 64, 64), marks=pytest.mark.device),
    pytest.param((16, 8, 128, 128), marks=pytest.mark.device),
    pytest.param((5, 1, 256, 256), marks=pytest.mark.device),
    (3, 3, 80, 80),
    (6, 2, 96, 96),
    (6, 2, 128, 32),
    pytest.param((5, 2, 80, 20), marks=pytest.mark.device),
    (3, 2, 96, 72),
    (2, 1, 10, 6),
    (33, 2, 16, 16),
]


class Case:
    """A fused projection of six tokens, two of them padding, and pools full of NaN."""

    def __init__(self, shape, dtype, device, *, with_norms=True, rotates=True, offset=0.0):
        torch.manual_seed(sum(shape))
        heads, kv_heads, head_dim, rot = shape
        self.sizes = (heads, kv_heads, kv_heads)
        self.fused = torch.randn(len(SLOTS), heads + 2 * kv_heads, head_dim).to(dtype).to(device)
        self.pools = torch.full((NUM_PAGES, 2, kv_heads, PAGE, head_dim), NAN, dtype=dtype, device=device)
        self.positions = torch.tensor(POSITIONS, dtype=torch.int32, device=device)
        self.slots = torch.tensor(SLOTS, device=device)
        angle = torch.arange(MAX_LEN)[:, None] / 100.0 ** (torch.arange(rot // 2) / (rot // 2))
        self.cos_sin = torch.cat((angle.cos(), angle.sin()), -1).float().to(device) if rotates else None
        self.norms = None
        if with_norms:
            q_weight, k_weight = torch.randn(2, head_dim).to(dtype).to(device)
            self.norms = HeadNorms(q=q_weight, k=k_weight, eps=EPS, weight_offset=offset)

    def parts(self):
        return self.fused.split_with_sizes(self.sizes, dim=1)

    def places(self):
        return self.pools[:, 0], self.pools[:, 1], self.slots

    def run(self):
        out = qk_norm_rope(*self.parts(), self.positions, *self.places(), cos_sin=self.cos_sin, norms=self.norms)
        return out.cpu()

    def by_reference(self):
        """(q, pools) of the reference on the CPU, from what this case holds now."""
        q, k, v = (x.cpu() for x in self.parts())
        pools, norms = self.pools.cpu().clone(), self.norms
        told = None if norms is None else (norms.q.cpu(), norms.k.cpu(), norms.eps, norms.weight_offset)
        cos_sin = None if self.cos_sin is None else self.cos_sin.cpu()
        places = (pools[:, 0], pools[:, 1], self.slots.cpu())
        q = reference.qk_norm_rope(q, k, v, self.positions.cpu(), *places, cos_sin=cos_sin, norms=told)
        return q, pools


def oracle(x, weight, norms, positions, cos_sin, dtype):
    """(the result in fp64 with the norm rounded as it must be, the size of what the rotation adds up)."""
    wide = x.cpu().double()
    if norms is not None:
        scale = (wide.square().mean(-1, keepdim=True) + norms.eps).rsqrt()
        wide = (wide * scale * (weight.cpu().double() + norms.weight_offset)).to(dtype).double()
    if cos_sin is None:
        return wide, wide.abs()
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin.cpu()[positions.cpu().long()].double()[:, None].split((half, half), dim=-1)
    first, second, rest = wide.split((half, half, wide.shape[-1] - 2 * half), dim=-1)
    size = first.abs() + second.abs()
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
    return turned, torch.cat((size, size, rest.abs()), dim=-1)


def assert_close(got, want, size, has_norms):
    # A norm that falls on the other side of a rounding moves one of the terms by a whole unit.
    allowed = HALF_ULP[got.dtype] * (want.abs() + (2 * size if has_norms else 0)) + 1e-6 * size
    assert got.isfinite().all(), "not everything was written"
    assert ((got.double() - want).abs() <= allowed).all()


def stored(case, plane):
    """What lies at the slots of the real tokens, and that nothing else was written."""
    pool = case.pools.cpu()[:, plane]
    flat = pool.transpose(1, 2).reshape(NUM_PAGES * PAGE, *pool.shape[1:2], pool.shape[3])
    real = [slot for slot in SLOTS if slot >= 0]
    assert int((~flat.isnan()).sum()) == len(real) * flat[0].numel()
    return flat[real]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("with_norms", [True, False], ids=["norms", ""])
def test_matches_the_oracle(triton_only, device, gpu_dtype, shape, with_norms):
    case = Case(shape, gpu_dtype, device, with_norms=with_norms, offset=1.0)
    q, k, v = (x.clone() for x in case.parts())
    q_weight, k_weight = (case.norms.q, case.norms.k) if with_norms else (None, None)
    shared = (case.norms, case.positions, case.cos_sin, gpu_dtype)
    real = [slot >= 0 for slot in SLOTS]
    assert_close(case.run(), *oracle(q, q_weight, *shared), with_norms)
    want, size = oracle(k, k_weight, *shared)
    assert_close(stored(case, 0), want[real], size[real], with_norms)
    assert torch.equal(stored(case, 1), v.cpu()[real])
    assert torch.equal(case.parts()[2], v)


@pytest.mark.parametrize("shape", [(4, 2, 64, 64), pytest.param((16, 8, 128, 128), marks=pytest.mark.device)], ids=str)
def test_norms_are_rounded_before_the_rotation(triton_only, device, gpu_dtype, shape):
    """The reference's bits but for a few: rounding once at the end would change a third of them."""
    case = Case(shape, gpu_dtype, device)
    want, pools = case.by_reference()
    got = case.run()
    if gpu_dtype != torch.float32:
        assert (got != want).float().mean() < 0.03
        assert (case.pools.cpu().nan_to_num(9.0) != pools.nan_to_num(9.0)).float().mean() < 0.03


@pytest.mark.device
@pytest.mark.parametrize("with_norms", [True, False], ids=["norms", ""])
def test_no_rotation(triton_only, device, gpu_dtype, with_norms):
    case = Case((5, 2, 80, 80), gpu_dtype, device, with_norms=with_norms, rotates=False)
    q, k, _ = (x.clone() for x in case.parts())
    shared = (case.norms, case.positions, None, gpu_dtype)
    weights = (case.norms.q, case.norms.k) if with_norms else (None, None)
    assert_close(case.run(), *oracle(q, weights[0], *shared), with_norms)
    want, size = (x[[slot >= 0 for slot in SLOTS]] for x in oracle(k, weights[1], *shared))
    assert_close(stored(case, 0), want, size, with_norms)


@pytest.mark.device
def test_padding_full_of_nan_reaches_nobody(triton_only, device, gpu_dtype):
    case, clean = (Case((5, 2, 64, 64), gpu_dtype, device) for _ in range(2))
    padding = [slot < 0 for slot in SLOTS]
    case.fused[padding] = NAN
    got, want = case.run(), clean.run()
    real = [not p for p in padding]
    assert torch.equal(got[real], want[real])
    for plane in (0, 1):
        assert torch.equal(stored(case, plane), stored(clean, plane))


@pytest.mark.device
def test_wide_positions_are_positions(triton_only, device, gpu_dtype):
    case, wide = (Case((5, 2, 64, 32), gpu_dtype, device) for _ in range(2))
    wide.positions = wide.positions.long()
    assert torch.equal(case.run(), wide.run())


@pytest.mark.device
@pytest.mark.parametrize("shape", [(9, 3, 64, 64), (5, 2, 80, 20)], ids=str)
def test_parts_in_place(triton_only, device, gpu_dtype, shape):
    """`rope` writes q and k; `rope_store_kv` that and the pools; both as the fused call does it."""
    fused, alone, both = (Case(shape, gpu_dtype, device, with_norms=False) for _ in range(3))
    q = fused.run()
    rope(*alone.parts()[:2], alone.positions, alone.cos_sin)
    rope_store_kv(*both.parts(), both.positions, both.cos_sin, *both.places())
    assert torch.equal(alone.parts()[0].cpu(), q)
    assert torch.equal(alone.fused, both.fused)
    assert torch.equal(stored(both, 0), stored(fused, 0))
    assert torch.equal(stored(both, 0), both.parts()[1].cpu()[[slot >= 0 for slot in SLOTS]])
    assert torch.equal(stored(both, 1), stored(fused, 1))


@pytest.mark.device
def test_store_alone(triton_only, device, gpu_dtype):
    case = Case((2, 3, 80, 80), gpu_dtype, device)
    before = case.fused.clone()
    store_kv(*case.parts()[1:], *case.places())
    for plane in (0, 1):
        assert torch.equal(stored(case, plane), before.split(case.sizes, dim=1)[1 + plane].cpu()[[0, 2, 3, 5]])
    assert torch.equal(case.fused, before)


@pytest.mark.device
def test_pages_beyond_two_billion_elements(triton_only, device):
    """Only what is written is touched: the pool needs address space, not memory."""
    page_elements, last = 1 << 27, 17
    memory = torch.empty(page_elements * last + 2 * PAGE * 16, dtype=torch.float16, device=device)
    pools = memory.as_strided((last + 1, 2, 1, PAGE, 16), (page_elements, PAGE * 16, PAGE * 16, 16, 1))
    k, v = torch.randn(2, 1, 1, 16, dtype=torch.float16, device=device)
    store_kv(k, v, pools[:, 0], pools[:, 1], torch.tensor([last * PAGE + 3], device=device))
    assert torch.equal(pools[last, 0, :, 3], k[0])
    assert torch.equal(pools[last, 1, :, 3], v[0])


@pytest.mark.device
def test_no_tokens(triton_only, device):
    case = Case((4, 2, 64, 64), torch.float32, device)
    case.fused, case.positions, case.slots = case.fused[:0], case.positions[:0], case.slots[:0]
    assert case.run().shape == (0, 4, 64)
    assert case.pools.isnan().all()


@pytest.mark.parametrize("with_norms", [True, False])
@pytest.mark.parametrize("rotates", [True, False])
def test_on_a_cpu_it_is_its_parts(isa, with_norms, rotates):
    whole, apart = (Case((4, 2, 64, 64), torch.float32, "cpu", with_norms=with_norms, rotates=rotates) for _ in "12")
    got = whole.run()
    q, k, v = apart.parts()
    if with_norms:
        q, k = (rms_norm(x, w, EPS) for x, w in ((q, apart.norms.q), (k, apart.norms.k)))
    if rotates:
        rope_store_kv(q, k, v, apart.positions, apart.cos_sin, *apart.places())
    else:
        store_kv(k, v, *apart.places())
    assert torch.equal(got, q)
    assert torch.equal(whole.pools.nan_to_num(9.0), apart.pools.nan_to_num(9.0))


def test_what_does_not_fit_is_refused():
    with use_triton():
        case = Case((4, 2, 64, 64), torch.float32, "cpu")
        case.norms = HeadNorms(q=torch.ones(32), k=torch.ones(64), eps=EPS)
        with pytest.raises(ValueError, match="head size"):
            case.run()
        case.cos_sin = torch.zeros(4, 65)
        with pytest.raises(ValueError, match="even"):
            case.run()
        case.cos_sin, case.slots = None, case.slots.int()
        with pytest.raises(ValueError, match="int64"):
            case.run()
    with use_isa("reference"):
        assert Case((4, 2, 64, 64), torch.float32, "cpu").run().isfinite().all()
