"""Recorded steps on a CPU: some hundred operators, each called from Python, become one call.

What CUDA graphs are on a GPU, but one recording serves steps of any size. An operator of a small model takes some ten
microseconds at small batches, and so does calling it; between two of them the other threads fall asleep.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nightmill_kernels.backend import library_for
from nightmill_kernels.cpu.library import Library, LinearCall
from nightmill_kernels.cpu.recording import Recording, StepCall
from nightmill_worker.engine.step import StepPlan
from nightmill_worker.model.decoder import Decoder
from nightmill_worker.model.drawn_tokens import DrawnTokens, find_drawn
from nightmill_worker.model.layers import StepTensors
from nightmill_worker.model.plan_tensors import drawn_attention, share, step_tensors
from nightmill_worker.model.workspace import Workspace

_Key = tuple[str, int]  # instruction set, threads


class StepRecordings:
    """The recordings of one model, and the places that they read a step's tokens from and write its logits to."""

    def __init__(self, decoder: Decoder, workspace: Workspace, *, max_tokens: int, vocab_size: int) -> None:
        """
        Args:
            decoder: Its page pool must stay where it is.
            workspace: For steps of at least `max_tokens` tokens.
            max_tokens: Larger steps are not recorded.
            vocab_size: V.
        """
        self._decoder = decoder
        self._workspace = workspace
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size
        self._logits: Tensor | None = None  # [num_logit_rows, V]
        self._recordings: dict[_Key, Recording] = {}
        self._refused = False

    @property
    def num_recorded(self) -> int:
        """So far."""
        return len(self._recordings)

    @property
    def num_logit_rows(self) -> int:
        """Rows of logits that there is room for: as many as a step drew at most, up to the next power of two."""
        return 0 if self._logits is None else len(self._logits)

    def logits(self, plan: StepPlan) -> Tensor | None:
        """What `Decoder.project` gives for a step, [R, V], R = 0 included; the next step overwrites it.

        None: the step cannot be recorded, or the model has an operator that is not the C library's.
        """
        if self._refused or not 0 < plan.num_tokens <= self._max_tokens or plan.token_source is not None:
            return None
        drawn = find_drawn(plan)
        if drawn is None:
            return None
        residual = self._workspace.residual(plan.num_tokens)
        library = library_for(residual)
        if library is None:
            return None
        key = (library.isa, torch.get_num_threads())
        recording = self._recordings.get(key)
        if recording is None and not len(drawn.index):
            return None  # it would record half of the calls
        self._decoder.embed(share(plan.token_ids), residual)
        logits = self._room(len(drawn.index), residual.dtype)
        if recording is None:
            recording = self._record(library, plan, drawn, logits)
            if recording is not None:
                self._recordings[key] = recording
            # Recording has computed it, or was given up in the middle of it: run again, as any other step is.
            return None if recording is None else logits
        library.replay(recording, _step_call(plan, drawn))
        return logits

    def _room(self, num_drawn: int, dtype: torch.dtype) -> Tensor:
        """Logits of so many rows, always at the same place but for steps that draw more than any before."""
        if self._logits is None or len(self._logits) < num_drawn:
            self._logits = None  # before the next ones: there may be no room for both
            rows = min(1 << (num_drawn - 1).bit_length(), self._max_tokens) if num_drawn else 0
            self._logits = torch.empty(rows, self._vocab_size, dtype=dtype)
            for recording in self._recordings.values():
                _head(recording).out = self._logits.data_ptr()
        return self._logits[:num_drawn]

    def _record(self, library: Library, plan: StepPlan, drawn: DrawnTokens, logits: Tensor) -> Recording | None:
        step = self._step(plan, drawn)
        with _Foreign() as foreign, library.recorder.recording() as recording:
            hidden = self._decoder.run_layers(self._workspace.residual(plan.num_tokens), step)
            self._decoder.project(hidden, logits)
        is_whole = foreign.found is None and recording.has_rows(plan.num_tokens, len(drawn.index))
        self._refused = not is_whole
        return recording if is_whole else None

    def _step(self, plan: StepPlan, drawn: DrawnTokens) -> StepTensors:
        """Drawn tokens are picked in every recording, if there is one or not that the step would not have to pick."""
        step = step_tensors(plan, self._workspace.take(plan.num_tokens))
        if step.sampled is not None:
            return step
        return replace(step, sampled=share(drawn.index), drawn=drawn_attention(plan, drawn))


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


def _head(recording: Recording) -> LinearCall:
    """The output projection: what a step ends with."""
    call = recording.call_at(len(recording) - 1)
    assert isinstance(call, LinearCall)
    return call


def _step_call(plan: StepPlan, drawn: DrawnTokens) -> StepCall:
    """`plan` and `drawn` must live until the replay is done."""
    groups = plan.groups
    return StepCall(
        positions=_at(plan.positions, np.int32),
        slots=_at(plan.slots, np.int64),
        query_starts=_at(plan.query_starts, np.int32),
        drawn_starts=_at(drawn.starts, np.int32),
        drawn=_at(drawn.index, np.int32),
        context_lens=_at(plan.context_lens, np.int32),
        page_tables=_at(plan.page_tables, np.int32),
        group_starts=None if groups is None else _at(groups.starts, np.int32),
        group_members=None if groups is None else _at(groups.sequences, np.int32),
        group_pages=None if groups is None else _at(groups.num_pages, np.int32),
        num_tokens=plan.num_tokens,
        num_drawn=len(drawn.index),
        num_sequences=plan.num_sequences,
        table_width=plan.page_tables.shape[1],
        num_groups=0 if groups is None else len(groups.num_pages),
        num_members=0 if groups is None else len(groups.sequences),
        groups_draw=drawn.groups_draw,
    )


def _at(array: NDArray[Any], dtype: type[np.generic]) -> int:
    if array.dtype != dtype or not array.flags.c_contiguous:
        raise ValueError(f"a step's arrays must be contiguous {dtype.__name__}, not {array.dtype} {array.strides}")
    return array.ctypes.data
