"""Recording what a piece of code asks of the C library, to have it done again by one call."""

from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import Array, Structure, addressof, c_int64, c_void_p
from enum import IntEnum
from typing import TypeVar

Call = TypeVar("Call", bound=Structure)


class Op(IntEnum):
    """enum nm_op."""

    RMS_NORM = 0
    ROPE_STORE = 1
    ATTENTION = 2
    LINEAR = 3
    LINEAR_INT8 = 4


class Step(Structure):
    """struct nm_step."""

    _fields_ = (("op", c_int64), ("call", c_void_p))


class Recording:
    """The calls of one run, in order. Their tensors must outlive it and keep their places: it knows addresses only."""

    def __init__(self) -> None:
        self._calls: list[tuple[Op, Structure]] = []
        self._steps: Array[Step] | None = None

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, op: Op, call: Structure) -> None:
        """Keep a call; it is read again at each replay, so its fields may be changed in between."""
        self._calls.append((op, call))
        self._steps = None

    def calls(self, kind: type[Call]) -> list[Call]:
        """Those of one kind, in order."""
        return [call for _, call in self._calls if isinstance(call, kind)]

    def op_at(self, place: int) -> Op:
        """What the call at a place of the order is."""
        return self._calls[place][0]

    def steps(self) -> Array[Step]:
        """All calls as nm_replay takes them; valid while the recording lives."""
        if self._steps is None:
            self._steps = (Step * len(self._calls))(*(Step(op, addressof(call)) for op, call in self._calls))
        return self._steps


class Recorder:
    """Where a library's calls are noted while somebody records."""

    def __init__(self) -> None:
        self._into: Recording | None = None

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """Note what is called in this block, besides doing it. Not to be nested, not for two threads."""
        if self._into is not None:
            raise RuntimeError("a recording is being made already")
        self._into = Recording()
        try:
            yield self._into
        finally:
            self._into = None

    @property
    def is_on(self) -> bool:
        """Whether somebody records."""
        return self._into is not None

    def note(self, op: Op, call: Structure) -> None:
        """Keep a call that was done."""
        if self._into is not None:
            self._into.add(op, call)
