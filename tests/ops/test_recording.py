"""Calls of the C library noted and done again: the same work on whatever lies there now, and the same complaints."""

import pytest
import torch

from nightmill_kernels.backend import library_for
from nightmill_kernels.cpu.library import AttentionCall, Library
from nightmill_kernels.linear import pack_linear
from nightmill_kernels.metadata import AttentionMetadata
from nightmill_kernels.paged_attention import paged_attention
from nightmill_kernels.rms_norm import add_rms_norm, rms_norm
from nightmill_kernels.rope import rope_store_kv

T, H, HK, D, PAGE = 3, 2, 1, 16, 4


def _library() -> Library:
    library = library_for(torch.zeros(1, dtype=torch.bfloat16))
    assert library is not None, "the C library must be there in every test run"
    return library


class _Block:
    """Norm, projection, rotation, attention and the residual, on tensors that stay."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        made = {"dtype": torch.bfloat16}
        self.residual, self.hidden = torch.randn(T, 32, **made), torch.empty(T, 32, **made)
        self.qkv, self.mixed = torch.empty(T, (H + 2 * HK) * D, **made), torch.empty(T, H, D, **made)
        self.norm = torch.rand(32, **made)
        packed = pack_linear(torch.randn((H + 2 * HK) * D, 32, **made) / 6)
        if packed is None:
            pytest.skip("this machine's linear layers are not the C library's")  # AMX: oneDNN multiplies
        self.packed = packed
        self.pools = (torch.zeros(8, HK, PAGE, D, **made), torch.zeros(8, HK, PAGE, D, **made))
        self.positions = torch.zeros(T, dtype=torch.int32)
        self.slots = torch.zeros(T, dtype=torch.int64)
        self.cos_sin = torch.randn(64, D)
        self.meta = AttentionMetadata(
            query_starts=torch.arange(T + 1, dtype=torch.int32),
            context_lens=torch.ones(T, dtype=torch.int32),
            page_tables=torch.zeros(T, 2, dtype=torch.int32),
            max_query_len=1,
        )
        self.place(0)

    def place(self, position: int) -> None:
        """Where the tokens stand: sequence s has pages 2s + 1 and 2s + 2."""
        pages = torch.arange(1, 2 * T + 1, dtype=torch.int32).view(T, 2)
        self.meta.page_tables.copy_(pages)
        self.meta.context_lens.fill_(position + 1)
        self.positions.fill_(position)
        self.slots.copy_(pages[:, position // PAGE].long() * PAGE + position % PAGE)

    def run(self) -> None:
        rms_norm(self.residual, self.norm, 1e-5, out=self.hidden)
        qkv = self.packed(self.hidden, self.qkv).view(T, H + 2 * HK, D)
        q, k, v = qkv.split((H, HK, HK), dim=1)
        rope_store_kv(q, k, v, self.positions, self.cos_sin, *self.pools, self.slots)
        paged_attention(q, *self.pools, self.meta, scale=0.25, out=self.mixed)
        add_rms_norm(self.mixed.flatten(1), self.residual, self.norm, 1e-5, out=self.hidden)


def test_replays_what_was_recorded_on_what_lies_there_now() -> None:
    library, block, twin = _library(), _Block(), _Block()
    with library.recorder.recording() as recording:
        block.run()
    twin.run()
    for position in range(1, 2 * PAGE):
        for each in (block, twin):
            each.place(position)
            each.residual.mul_(1.25)
        library.replay(recording)
        twin.run()
        assert torch.equal(block.hidden, twin.hidden)
        assert torch.equal(block.residual, twin.residual)
    assert all(torch.equal(ours, its) for ours, its in zip(block.pools, twin.pools, strict=True))


def test_what_a_call_finds_wrong_is_said_as_by_the_call_itself() -> None:
    library, block = _library(), _Block()
    with library.recorder.recording() as recording:
        block.run()
    block.meta.page_tables.fill_(8)
    with pytest.raises(ValueError, match="attention: a page table holds a page id outside the pool"):
        library.replay(recording)
    block.place(1)
    block.slots.fill_(8 * PAGE)
    with pytest.raises(ValueError, match="rope_store: a slot lies outside the pool"):
        library.replay(recording)


def test_a_recorded_call_may_be_changed() -> None:
    library, block = _library(), _Block()
    with library.recorder.recording() as recording:
        block.run()
    (call,) = recording.calls(AttentionCall)
    block.mixed.zero_()
    call.dtype = 7
    with pytest.raises(ValueError, match="none that the library takes"):
        library.replay(recording)


def test_calls_are_noted_only_in_the_block() -> None:
    library, block = _library(), _Block()
    with library.recorder.recording() as recording:
        block.run()
    count = len(recording)
    block.run()
    assert len(recording) == count == 5
    with library.recorder.recording(), pytest.raises(RuntimeError, match="made already"), library.recorder.recording():
        pass
