"""Calls of the C library noted and done again for steps of other sizes: the same work, and the same complaints."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from nightmill_kernels.backend import library_for
from nightmill_kernels.cpu.library import KeepCall, Library
from nightmill_kernels.cpu.recording import Op, Recording, Rows, StepCall
from nightmill_kernels.keep_rows import keep_rows
from nightmill_kernels.linear import pack_linear
from nightmill_kernels.metadata import AttentionMetadata
from nightmill_kernels.paged_attention import paged_attention
from nightmill_kernels.rms_norm import add_rms_norm, rms_norm
from nightmill_kernels.rope import rope_store_kv

MAX_TOKENS, H, HK, D, PAGE, WIDTH, NUM_PAGES = 8, 2, 1, 16, 4, 32, 9


def _library() -> Library:
    library = library_for(torch.zeros(1, dtype=torch.bfloat16))
    assert library is not None, "the C library must be there in every test run"
    return library


@dataclass(frozen=True, kw_only=True)
class _Step:
    positions: Tensor
    slots: Tensor
    drawn: Tensor
    all: AttentionMetadata
    of_drawn: AttentionMetadata

    def call(self) -> StepCall:
        meta = self.all
        return StepCall(
            positions=self.positions.data_ptr(),
            slots=self.slots.data_ptr(),
            query_starts=meta.query_starts.data_ptr(),
            drawn_starts=self.of_drawn.query_starts.data_ptr(),
            drawn=self.drawn.data_ptr(),
            context_lens=meta.context_lens.data_ptr(),
            page_tables=meta.page_tables.data_ptr(),
            num_tokens=len(self.positions),
            num_drawn=len(self.drawn),
            num_sequences=meta.num_sequences,
            table_width=meta.page_tables.shape[1],
        )


def _step(work: list[tuple[int, int, bool]]) -> _Step:
    """(first position, tokens, whether the last one is drawn) of each sequence; s has pages 2s + 1 and 2s + 2."""
    pages = torch.arange(1, 2 * len(work) + 1, dtype=torch.int32).view(-1, 2)
    firsts, counts, draws = (torch.tensor(column) for column in zip(*work, strict=True))
    ends = counts.cumsum(0)
    sequence = torch.repeat_interleave(counts)
    positions = torch.arange(int(ends[-1])) - (ends - counts)[sequence] + firsts[sequence]
    starts = [torch.nn.functional.pad(each.cumsum(0), (1, 0)).int() for each in (counts, draws.int())]
    metas = [
        AttentionMetadata(
            query_starts=each, context_lens=(firsts + counts).int(), page_tables=pages, max_query_len=max(counts)
        )
        for each in starts
    ]
    return _Step(
        positions=positions.int(),
        slots=pages[sequence, positions // PAGE].long() * PAGE + positions % PAGE,
        drawn=(ends[draws] - 1).int(),
        all=metas[0],
        of_drawn=metas[1],
    )


class _Block:
    """Two rounds of norm, projection, rotation, attention, residual; the second attends for drawn tokens only."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        made = {"dtype": torch.bfloat16}
        self.residual, self.hidden = torch.randn(MAX_TOKENS, WIDTH, **made), torch.empty(MAX_TOKENS, WIDTH, **made)
        self.qkv = torch.empty(MAX_TOKENS, (H + 2 * HK) * D, **made)
        self.mixed = torch.empty(MAX_TOKENS, H, D, **made)
        self.norm = torch.rand(WIDTH, **made)
        packed = pack_linear(torch.randn((H + 2 * HK) * D, WIDTH, **made) / 6)
        if packed is None:
            pytest.skip("this machine's linear layers are not the C library's")  # AMX: oneDNN multiplies
        self.packed = packed
        shape = (NUM_PAGES, HK, PAGE, D)
        self.pools = [(torch.zeros(shape, **made), torch.zeros(shape, **made)) for _ in range(2)]
        self.cos_sin = torch.randn(64, D)

    def fill(self, seed: int) -> None:
        self.residual.copy_(torch.randn(self.residual.shape, generator=torch.Generator().manual_seed(seed)))

    def run(self, step: _Step) -> None:
        count = len(step.positions)
        q = self._store(step, 0)
        paged_attention(q, *self.pools[0], step.all, scale=0.25, out=self.mixed[:count])
        mixed, residual = self.mixed[:count].flatten(1), self.residual[:count]
        add_rms_norm(mixed, residual, self.norm, 1e-5, out=self.hidden[:count])
        q = keep_rows(self._store(step, 1), step.drawn)
        residual, count = keep_rows(residual, step.drawn), len(step.drawn)
        paged_attention(q, *self.pools[1], step.of_drawn, scale=0.25, out=self.mixed[:count])
        add_rms_norm(self.mixed[:count].flatten(1), residual, self.norm, 1e-5, out=self.hidden[:count])

    def _store(self, step: _Step, layer: int) -> Tensor:
        count = len(step.positions)
        hidden = rms_norm(self.residual[:count], self.norm, 1e-5, out=self.hidden[:count])
        qkv = self.packed(hidden, self.qkv[:count]).view(count, H + 2 * HK, D)
        q, k, v = qkv.split((H, HK, HK), dim=1)
        rope_store_kv(q, k, v, step.positions, self.cos_sin, *self.pools[layer], step.slots)
        return q


DECODES = _step([(2, 1, True), (3, 1, True), (7, 1, True)])
MIXED = _step([(0, 4, True), (4, 1, True), (1, 3, False)])
ONE = _step([(5, 1, True)])
STEPS = [DECODES, MIXED, ONE, _step([(0, 8, True)]), _step([(1, 2, False), (0, 1, True), (0, 1, False), (6, 2, True)])]


def _recorded(block: _Block, step: _Step) -> Recording:
    with _library().recorder.recording() as recording:
        block.run(step)
    return recording


@pytest.mark.parametrize("first", [DECODES, MIXED, ONE], ids=["decodes", "mixed", "one"])
def test_replays_any_step_on_what_lies_there_now(first: _Step) -> None:
    library, block, twin = _library(), _Block(), _Block()
    recording = _recorded(block, first)
    assert recording.has_rows(len(first.positions), len(first.drawn))
    twin.run(first)
    for seed, step in enumerate(STEPS * 2):
        for each in (block, twin):
            each.fill(seed)
        library.replay(recording, step.call())
        twin.run(step)
        drawn = len(step.drawn)
        assert torch.equal(block.hidden[:drawn], twin.hidden[:drawn])
        assert torch.equal(block.residual[:drawn], twin.residual[:drawn])
    for ours, its in zip(block.pools, twin.pools, strict=True):
        assert all(torch.equal(*pair) for pair in zip(ours, its, strict=True))


def test_nothing_drawn_stores_keys_and_values_and_leaves_it_at_that() -> None:
    library, block, twin = _library(), _Block(), _Block()
    recording = _recorded(block, MIXED)
    twin.run(MIXED)
    work = [(4, 4, True), (5, 1, False), (4, 2, False)]
    nobody = _step([(first, count, False) for first, count, _ in work])
    for each in (block, twin):
        each.fill(7)
    library.replay(recording, nobody.call())
    twin.run(_step(work))
    for ours, its in zip(block.pools, twin.pools, strict=True):
        assert all(torch.equal(*pair) for pair in zip(ours, its, strict=True))
    count = len(nobody.positions)
    assert torch.equal(block.hidden[:count], rms_norm(block.residual[:count], block.norm, 1e-5))


def test_rows_are_counted_by_tokens_until_some_are_kept() -> None:
    block = _Block()
    recording = _recorded(block, MIXED)
    ops = [recording.op_at(place) for place in range(len(recording))]
    kinds = [Rows(call.rows) for call in recording.calls()]
    assert ops.count(Op.KEEP_ROWS) == 2
    kept = ops.index(Op.KEEP_ROWS)
    assert kinds == [Rows.TOKENS] * kept + [Rows.DRAWN] * (len(ops) - kept)
    assert recording.has_rows(8, 2)
    assert not recording.has_rows(7, 2)
    assert not recording.has_rows(8, 3)


def test_what_a_call_finds_wrong_is_said_as_by_the_call_itself() -> None:
    library, block = _library(), _Block()
    recording = _recorded(block, MIXED)
    tables = replace(MIXED.all, page_tables=torch.full_like(MIXED.all.page_tables, NUM_PAGES))
    with pytest.raises(ValueError, match="attention: a page table holds a page id outside the pool"):
        library.replay(recording, replace(MIXED, all=tables).call())
    with pytest.raises(ValueError, match="rope_store: a slot lies outside the pool"):
        library.replay(recording, replace(MIXED, slots=MIXED.slots + NUM_PAGES * PAGE).call())
    with pytest.raises(ValueError, match="rope_store: a position lies outside the cos_sin table"):
        library.replay(recording, replace(MIXED, positions=MIXED.positions + 64).call())
    for drawn in ([4, 3], [3, 3], [3, 8], [-1, 3]):
        with pytest.raises(ValueError, match="keep_rows: rows to keep must ascend within those given"):
            library.replay(recording, replace(MIXED, drawn=torch.tensor(drawn, dtype=torch.int32)).call())


def test_a_recorded_call_may_be_changed() -> None:
    library, block = _library(), _Block()
    recording = _recorded(block, MIXED)
    recording.call_at(0).dtype = 7
    with pytest.raises(ValueError, match="call 0 of a recording is none that the library takes"):
        library.replay(recording, MIXED.call())


def test_calls_are_noted_only_in_the_block() -> None:
    library, block = _library(), _Block()
    recording = _recorded(block, MIXED)
    count = len(recording)
    block.run(MIXED)
    assert len(recording) == count == 12
    with library.recorder.recording(), pytest.raises(RuntimeError, match="made already"), library.recorder.recording():
        pass


def test_a_call_of_another_number_of_rows_is_found() -> None:
    recording = Recording()
    recording.add(Op.KEEP_ROWS, KeepCall(count=3))
    assert recording.has_rows(5, 3)
    assert not recording.has_rows(5, 2)
