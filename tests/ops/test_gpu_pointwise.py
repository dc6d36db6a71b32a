"""Norms and gated activations in Triton against fp64."""

import pytest
import torch

from nightmill_kernels.gated_mul import gelu_mul, silu_mul
from nightmill_kernels.rms_norm import add_rms_norm, rms_norm

pytestmark = pytest.mark.usefixtures("triton_only")

HALF_ULP = {torch.float32: 2e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}
"""Of a value: one rounding to the dtype; in fp32 a few, and a device's approximate reciprocal root and exponential."""

FP32_SLACK = 3e-6
"""Of the terms that were summed or cut: what fp32 inside adds, whatever the dtype of the result."""

# The interpreter computes with numpy, which warns of infinities that are meant.
overflows = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

NAN = float("nan")


def assert_close(got, want, scale=1.0):
    allowed = HALF_ULP[got.dtype] * want.abs() + FP32_SLACK * scale
    assert got.isfinite().all(), "not everything was written"
    assert ((got.cpu().double() - want).abs() <= allowed).all()


def norm_oracle(x, weight, offset=0.0):
    wide = x.cpu().double()
    return wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (weight.cpu().double() + offset)


def randoms(*shapes, dtype, device):
    return [torch.randn(shape).to(dtype).to(device) for shape in shapes]


SIZES = [1, 7, 64, 100, 576, 1100, pytest.param(1024, marks=pytest.mark.device)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(device, gpu_dtype, size, offset):
    torch.manual_seed(size)
    wide, weight = randoms((5, size + 3), (size,), dtype=gpu_dtype, device=device)
    x = wide[:, :size]
    out = torch.full((5, size), NAN, dtype=gpu_dtype, device=device)
    assert rms_norm(x, weight, 1e-5, weight_offset=offset, out=out) is out
    assert_close(out, norm_oracle(x, weight, offset))
    assert torch.equal(rms_norm(x, weight, 1e-5, weight_offset=offset), out)
    # Rows of x are not aligned to 16 bytes, those of out may be: another build, which adds up in another order.
    want = norm_oracle(x, weight, offset)
    rms_norm(x, weight, 1e-5, weight_offset=offset, out=x)
    assert_close(x, want)


@pytest.mark.parametrize(("heads", "head_dim"), [(3, 64), (1, 256), pytest.param(5, 80, marks=pytest.mark.device)])
def test_rms_norm_of_heads_in_a_fused_projection(device, gpu_dtype, heads, head_dim):
    fused, weight = randoms((7, heads + 4, head_dim), (head_dim,), dtype=gpu_dtype, device=device)
    before, part = fused.clone(), fused[:, 2 : 2 + heads]
    rms_norm(part, weight, 1e-5, out=part)
    assert_close(part, norm_oracle(before[:, 2 : 2 + heads], weight))
    assert torch.equal(fused[:, :2], before[:, :2])
    assert torch.equal(fused[:, 2 + heads :], before[:, 2 + heads :])


@pytest.mark.parametrize("size", SIZES)
def test_add_rms_norm_normalises_the_rounded_sum(device, gpu_dtype, size):
    x, residual, weight = randoms((3, size), (3, size), (size,), dtype=gpu_dtype, device=device)
    total = x + residual
    out, carried = add_rms_norm(x, residual, weight, 1e-5)
    assert carried is residual
    assert torch.equal(carried, total)
    assert_close(out, norm_oracle(total, weight))


@pytest.mark.device
def test_a_row_of_nan_stays_alone(device, gpu_dtype):
    x = torch.ones(20, 40, dtype=gpu_dtype, device=device)  # several rows of a program
    x[3, 7] = NAN
    out = rms_norm(x, torch.ones(40, dtype=gpu_dtype, device=device), 1e-5)
    assert out[3].isnan().all()
    out[3] = 0
    assert out.isfinite().all()


@overflows
@pytest.mark.parametrize("size", [1, 15, 100, 512, 600, pytest.param(1536, marks=pytest.mark.device)])
@pytest.mark.parametrize("name", ["silu", "gelu"])
def test_gated_mul(device, gpu_dtype, size, name):
    torch.manual_seed(size)
    (wide,) = randoms((3, 2 * size + 5), dtype=gpu_dtype, device=device)
    wide *= 4
    x = wide[:, : 2 * size]
    gate, up = x.cpu().double().chunk(2, dim=-1)
    if name == "silu":
        got, want = silu_mul(x), torch.nn.functional.silu(gate) * up
    else:
        got, want = gelu_mul(x), torch.nn.functional.gelu(gate, approximate="tanh") * up
    assert got.shape == (3, size)
    assert_close(got, want, scale=4.0 + want.abs())


@overflows
@pytest.mark.device
def test_gated_mul_of_extremes(device):
    gate = torch.tensor([[-1e30, -200.0, -90.0, 0.0, 90.0, 200.0, 1e30, NAN]], device=device)
    x = torch.cat((gate, torch.ones_like(gate)), dim=-1)
    for got in (silu_mul(x).cpu(), gelu_mul(x).cpu()):
        assert torch.allclose(got[0, :3], torch.zeros(3), atol=1e-6)
        assert torch.equal(got[0, 3:7], gate[0, 3:7].cpu())
        assert got[0, 7].isnan()


@pytest.mark.device
def test_no_tokens_at_all(device, gpu_dtype):
    weight = torch.ones(8, dtype=gpu_dtype, device=device)
    empty = torch.empty(0, 8, dtype=gpu_dtype, device=device)
    assert rms_norm(empty, weight, 1e-5).shape == (0, 8)
    assert add_rms_norm(empty, empty.clone(), weight, 1e-5)[0].shape == (0, 8)
    assert silu_mul(empty).shape == (0, 4)
