"""Recording what a piece of code asks of the C library, to have it done again by one call for any other step."""

from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import Array, Structure, addressof, c_int32, c_int64, c_void_p
from enum import IntEnum


class Op(IntEnum):
    """enum nm_op."""

    RMS_NORM = 0
    ROPE_STORE = 1
    ATTENTION = 2
    LINEAR = 3
    LINEAR_INT8 = 4
    KEEP_ROWS = 5


class Rows(IntEnum):
    """enum nm_rows: what a call has a row for."""

    TOKENS = 0
    DRAWN = 1


_NUM_ROWS = {Op.RMS_NORM: "outer", Op.ROPE_STORE: "num_tokens", Op.ATTENTION: "num_tokens", Op.KEEP_ROWS: "count"}


class Recorded(Structure):
    """struct nm_recorded."""

    _fields_ = (("op", c_int64), ("call", c_void_p), ("rows", c_int64))


class StepCall(Structure):
    """struct nm_step: what a replay tells the calls. Addresses: what lies there must outlive the replay."""

    _fields_ = (
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("query_starts", c_void_p),
        ("drawn_starts", c_void_p),
        ("drawn", c_void_p),
        ("context_lens", c_void_p),
        ("page_tables", c_void_p),
        ("group_starts", c_void_p),
        ("group_members", c_void_p),
        ("group_pages", c_void_p),
        ("num_tokens", c_int64),
        ("num_drawn", c_int64),
        ("num_sequences", c_int32),
        ("table_width", c_int32),
        ("num_groups", c_int32),
        ("num_members", c_int32),
        ("groups_draw", c_int32),
    )


class Recording:
    """The calls of one run, in order. Their tensors must outlive it and keep their places: it knows addresses only.

    Calls have a row for each of the step's tokens up to the first KEEP_ROWS, from there on one for each that is drawn.
    """

    def __init__(self) -> None:
        self._calls: list[tuple[Op, Structure, Rows]] = []
        self._array: Array[Recorded] | None = None

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, op: Op, call: Structure) -> None:
        """Keep a call; it is read again at each replay, so its fields may be changed in between."""
        is_drawn = op is Op.KEEP_ROWS or (len(self._calls) > 0 and self._calls[-1][2] is Rows.DRAWN)
        self._calls.append((op, call, Rows.DRAWN if is_drawn else Rows.TOKENS))
        self._array = None

    def op_at(self, place: int) -> Op:
        """What the call at a place of the order is."""
        return self._calls[place][0]

    def call_at(self, place: int) -> Structure:
        """The call at a place of the order."""
        return self._calls[place][1]

    def has_rows(self, num_tokens: int, num_drawn: int) -> bool:
        """Whether every call was made with so many rows: if not, a replay would be wrong about some of them."""
        expected = {Rows.TOKENS: num_tokens, Rows.DRAWN: num_drawn}
        return all(getattr(call, _NUM_ROWS.get(op, "rows")) == expected[rows] for op, call, rows in self._calls)

    def calls(self) -> Array[Recorded]:
        """All calls as nm_replay takes them; valid while the recording lives."""
        if self._array is None:
            entries = (Recorded(op, addressof(call), rows) for op, call, rows in self._calls)
            self._array = (Recorded * len(self._calls))(*entries)
        return self._array


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
