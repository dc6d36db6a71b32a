"""A step of many rows is replayed some rows at a time, all calls for them in turn: same bits, same complaints."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from nightmill_kernels.backend import library_for
from nightmill_kernels.cpu.library import Library
from nightmill_kernels.cpu.recording import StepCall
from nightmill_kernels.gated_mul import Gate
from nightmill_kernels.linear import pack_linear
from nightmill_kernels.linear_int8 import linear_int8, quantize_weight
from nightmill_kernels.rms_norm import add_rms_norm, rms_norm
from nightmill_kernels.rope import rope_store_kv

MAX_ROWS, WIDTH, INNER, HEADS, KV_HEADS, D, PAGE = 300, 64, 96, 3, 1, 32, 16
NUM_SLOTS = (MAX_ROWS // PAGE + 2) * PAGE


@pytest.fixture(params=[1, 2, 3], ids=lambda count: f"{count} threads")
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def _library() -> Library:
    library = library_for(torch.zeros(1, dtype=torch.bfloat16))
    assert library is not None, "the C library must be there in every test run"
    return library


class _Layer:
    """What lies between two attentions, with every kind of call that takes rows one by one."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        made = {"dtype": torch.bfloat16}
        up = pack_linear(torch.randn(2 * INNER, WIDTH, **made) / 8, gate=Gate.SILU)
        down = pack_linear(torch.randn(WIDTH, INNER, **made) / 10, torch.randn(WIDTH, **made))
        if up is None or down is None:
            pytest.skip("this machine's linear layers are not the C library's")  # AMX: oneDNN multiplies
        self.up, self.down = up, down
        self.qkv_weight = quantize_weight(torch.randn((HEADS + 2 * KV_HEADS) * D, WIDTH, **made) / 8)
        self.norm = torch.rand(WIDTH, **made)
        self.head_norm = torch.rand(D, **made)
        self.residual, self.hidden, self.delta = (torch.empty(MAX_ROWS, WIDTH, **made) for _ in range(3))
        self.gated = torch.empty(MAX_ROWS, INNER, **made)
        self.qkv = torch.empty(MAX_ROWS, (HEADS + 2 * KV_HEADS) * D, **made)
        self.pools = [torch.zeros(NUM_SLOTS // PAGE, KV_HEADS, PAGE, D, **made) for _ in range(2)]
        self.cos_sin = torch.randn(MAX_ROWS, D)
        self.positions = torch.arange(MAX_ROWS, dtype=torch.int32)
        self.slots = torch.randperm(NUM_SLOTS)[:MAX_ROWS]

    def fill(self, seed: int) -> None:
        draws = torch.Generator().manual_seed(seed)
        for each in (self.residual, self.delta):
            each.copy_(torch.randn(each.shape, generator=draws))

    def run(self, rows: int) -> None:
        hidden = add_rms_norm(self.delta[:rows], self.residual[:rows], self.norm, 1e-5, out=self.hidden[:rows])[0]
        gated = self.up(hidden, self.gated[:rows])
        delta = self.down(gated, self.delta[:rows])
        hidden = add_rms_norm(delta, self.residual[:rows], self.norm, 1e-5, out=self.hidden[:rows])[0]
        qkv = linear_int8(hidden, self.qkv_weight, out=self.qkv[:rows]).view(rows, HEADS + 2 * KV_HEADS, D)
        q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        rms_norm(q, self.head_norm, 1e-5, out=q)  # several norms in a row
        rope_store_kv(q, k, v, self.positions[:rows], self.cos_sin, *self.pools, self.slots[:rows])

    def step(self, rows: int) -> StepCall:
        return StepCall(
            positions=self.positions.data_ptr(), slots=self.slots.data_ptr(), num_tokens=rows, num_drawn=rows
        )

    def results(self) -> list[Tensor]:
        return [self.residual, self.hidden, self.delta, self.gated, self.qkv, *self.pools]


def test_pieces_give_the_bits_of_the_whole(threads: int) -> None:
    library, ours, plain = _library(), _Layer(), _Layer()
    for each in (ours, plain):
        each.fill(0)
        for left in each.results():
            left.zero_()
    with library.recorder.recording() as recording:
        ours.run(5)
    assert recording.has_rows(5, 0)
    plain.run(5)
    for rows in (300, 1, 15, 16, 17, 36, 64, 129, 256, 257):
        for each in (ours, plain):
            each.fill(rows)
        library.replay(recording, ours.step(rows))
        plain.run(rows)
        assert all(torch.equal(*pair) for pair in zip(ours.results(), plain.results(), strict=True)), rows


@pytest.mark.parametrize("row", [0, 128, 299])
def test_a_row_that_is_wrong_is_found_in_any_piece(threads: int, row: int) -> None:
    library, layer = _library(), _Layer()
    layer.fill(0)
    with library.recorder.recording() as recording:
        layer.run(5)
    layer.slots[row] = NUM_SLOTS
    with pytest.raises(ValueError, match="rope_store: a slot lies outside the pool"):
        library.replay(recording, layer.step(300))
    layer.slots[row], layer.positions[row] = 0, MAX_ROWS
    with pytest.raises(ValueError, match="rope_store: a position lies outside the cos_sin table"):
        library.replay(recording, layer.step(300))
    layer.positions[row] = 0
    library.replay(recording, layer.step(300))
