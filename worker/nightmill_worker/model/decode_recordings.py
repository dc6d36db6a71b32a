"""Recorded decode steps on a CPU: some hundred operators, each called from Python, become one call.

What CUDA graphs are on a GPU. An operator of a small model takes some ten microseconds at small batches, and so does
calling it; between two of them the other threads fall asleep.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nightmill_kernels.backend import library_for
from nightmill_kernels.cpu.library import AttentionCall, Library
from nightmill_kernels.cpu.recording import Recording
from nightmill_kernels.metadata import AttentionMetadata
from nightmill_worker.engine.step import PrefixGroups, StepPlan
from nightmill_worker.model.decoder import Decoder
from nightmill_worker.model.layers import StepTensors
from nightmill_worker.model.workspace import ANYWHERE, LayerBuffers, Workspace

MAX_ROWS = 128
"""Larger batches take so long that calling their operators one by one costs nothing to speak of."""

_Key = tuple[int, str, int]  # rows, instruction set, threads


class DecodeRecordings:
    """The recordings of one model, by number of rows, and the places that they read a step's inputs from."""

    def __init__(
        self,
        decoder: Decoder,
        workspace: Workspace,
        *,
        max_rows: int,
        max_pages: int,
        hidden_size: int,
        vocab_size: int,
    ) -> None:
        """
        Args:
            decoder: Its page pool must stay where it is.
            workspace: For steps of at least `max_rows` tokens.
            max_rows: Larger steps are not recorded.
            max_pages: Pages that a sequence may have.
            hidden_size: d.
            vocab_size: V.
        """
        self._decoder = decoder
        self._workspace = workspace
        self._max_rows = min(max_rows, MAX_ROWS)
        self._hidden_size, self._vocab_size = hidden_size, vocab_size
        self._max_pages = max_pages
        self._inputs: _Inputs | None = None  # made for the first step that is recorded
        self._recordings: dict[_Key, tuple[Recording, list[AttentionCall]]] = {}
        self._refused = False

    @property
    def num_recorded(self) -> int:
        """So far."""
        return len(self._recordings)

    def logits(self, plan: StepPlan) -> Tensor | None:
        """What `Decoder.project` gives for a step that only decodes, [T, V]; the next step overwrites it.

        None: not such a step, or the model has an operator that is not the C library's.
        """
        if self._refused or not _only_decodes(plan) or plan.num_tokens > self._max_rows:
            return None
        residual = self._decoder.embed(torch.from_numpy(plan.token_ids.copy()))
        library = library_for(residual)
        if library is None:
            return None
        inputs = self._staged(plan, residual)
        rows = plan.num_tokens
        key = (rows, library.isa, torch.get_num_threads())
        found = self._recordings.get(key)
        if found is None:
            recording = self._record(library, rows)
            if recording is not None:
                self._recordings[key] = recording, recording.calls(AttentionCall)
            # Recording has computed it, or was given up in the middle of it: run again, as any other step is.
            return inputs.logits[:rows] if recording is not None else None
        recording, attention = found
        _point_to_groups(attention, plan.groups)
        library.replay(recording)
        return inputs.logits[:rows]

    def _staged(self, plan: StepPlan, residual: Tensor) -> "_Inputs":
        if self._inputs is None:
            self._inputs = _Inputs(self._max_rows, self._max_pages, self._hidden_size, self._vocab_size, residual.dtype)
        self._inputs.put(plan, residual)
        return self._inputs

    def _record(self, library: Library, rows: int) -> Recording | None:
        assert self._inputs is not None
        step = self._inputs.step(rows, self._workspace.take(rows))
        if step.buffers is ANYWHERE:
            return None
        with _Foreign() as foreign, library.recorder.recording() as recording:
            hidden = self._decoder.run_layers(self._inputs.residual[:rows], step)
            self._decoder.project(hidden, self._inputs.logits[:rows])
        self._refused = foreign.found is not None
        return None if self._refused else recording


class _Inputs:
    """A step's inputs and logits at places that stay."""

    def __init__(self, max_rows: int, max_pages: int, hidden_size: int, vocab_size: int, dtype: torch.dtype) -> None:
        self.residual = torch.empty(max_rows, hidden_size, dtype=dtype)
        self.logits = torch.empty(max_rows, vocab_size, dtype=dtype)
        self._positions = np.zeros(max_rows, np.int32)
        self._slots = np.zeros(max_rows, np.int64)
        self._query_starts = np.arange(max_rows + 1, dtype=np.int32)
        self._context_lens = np.zeros(max_rows, np.int32)
        self._page_tables = np.zeros((max_rows, max_pages), np.int32)

    def put(self, plan: StepPlan, residual: Tensor) -> None:
        rows, num_pages = plan.page_tables.shape
        self.residual[:rows] = residual
        self._positions[:rows] = plan.positions
        self._slots[:rows] = plan.slots
        self._context_lens[:rows] = plan.context_lens
        self._page_tables[:rows, :num_pages] = plan.page_tables

    def step(self, rows: int, buffers: LayerBuffers) -> StepTensors:
        """The staged step; groups are put into the recorded calls, where they may change."""
        return StepTensors(
            token_ids=torch.empty(0, dtype=torch.int32),
            positions=torch.from_numpy(self._positions[:rows]),
            slots=torch.from_numpy(self._slots[:rows]),
            attention=AttentionMetadata(
                query_starts=torch.from_numpy(self._query_starts[: rows + 1]),
                context_lens=torch.from_numpy(self._context_lens[:rows]),
                page_tables=torch.from_numpy(self._page_tables[:rows]),
                max_query_len=1,
                groups=None,
            ),
            sampled=None,
            buffers=buffers,
        )


class _Foreign(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Finds the first of torch's operators that computes or allocates: a recording knows nothing of it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: str | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: for that, torch would import its compiler in the first step of every engine, 1.4 s and 100 MB."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        aliases = [returned.alias_info for returned in func._schema.returns]
        if self.found is None and not all(alias is not None and not alias.is_write for alias in aliases):
            self.found = str(func)
        return func(*args, **(kwargs or {}))


def _only_decodes(plan: StepPlan) -> bool:
    """Every token is a sequence's only one in this step, and the next is drawn for each, in order."""
    tokens = plan.num_tokens
    return (
        0 < tokens == plan.num_sequences == len(plan.sample.token_index)
        and plan.token_source is None
        and bool((plan.sample.token_index == np.arange(tokens, dtype=np.int32)).all())
    )


def _point_to_groups(calls: list[AttentionCall], groups: PrefixGroups | None) -> None:
    """`groups` must live until the calls are done."""
    if groups is None:
        for call in calls:
            call.num_groups = call.num_members = 0
        return
    starts, members, pages = groups.starts.ctypes.data, groups.sequences.ctypes.data, groups.num_pages.ctypes.data
    for call in calls:
        call.group_starts, call.group_members, call.group_pages = starts, members, pages
        call.num_groups, call.num_members = len(groups.num_pages), len(groups.sequences)
