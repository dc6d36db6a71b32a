"""What the engine is doing, in a file that outlives it: for the one who finds it hung or dead.

A few array writes into mapped memory before each step: no system call, and nothing asked of an interpreter that hangs.
"""

from enum import IntEnum
from pathlib import Path

import numpy as np

from nightmill_worker.engine.page_pool import PagePool
from nightmill_worker.engine.running_table import Rows, RunningTable
from nightmill_worker.engine.step import StepPlan
from nightmill_worker.engine.waiting_queue import WaitingQueue

_MAX_SHOWN = 32
_MAGIC = 0x4E4D464C


class _Field(IntEnum):
    MAGIC = 0
    IS_RUNNING = 1
    STEP = 2
    SEQUENCES = 3
    TOKENS = 4
    WAITING = 5
    PARKED = 6
    PAGES_FREE = 7
    PAGES_CACHED = 8
    PAGES_ACTIVE = 9
    NUM_BEFORE = 10


class FlightRecorder:
    """Writes the state before and after each step."""

    def __init__(self, path: Path, table: RunningTable, queue: WaitingQueue, pool: PagePool) -> None:
        self._table = table
        self._queue = queue
        self._pool = pool
        size = len(_Field) + 3 * len(table.sequences)
        self._cells = np.memmap(path, np.int64, "w+", shape=(size,))
        self._cells[_Field.MAGIC] = _MAGIC
        self._rows = self._cells[len(_Field) :].reshape(3, -1)  # request id, tokens, computed tokens

    def begin(self, plan: StepPlan, rows: Rows, num_before: int = 0) -> None:
        """A step is about to run; `num_before`: after so many that were submitted and have not ended."""
        pool, queue, count = self._pool, self._queue, len(rows)
        fields = (1, plan.step, count, plan.num_tokens, len(queue), queue.num_parked)
        self._cells[_Field.IS_RUNNING : _Field.PAGES_FREE] = fields
        self._cells[_Field.PAGES_FREE : len(_Field)] = (pool.num_free, pool.num_cached, pool.num_active, num_before)
        self._rows[0, :count] = self._table.request_id[rows]
        self._rows[1, :count] = self._table.num_tokens[rows]
        self._rows[2, :count] = self._table.num_computed[rows]

    def end(self) -> None:
        """It has, and nothing else is in flight."""
        self._cells[_Field.IS_RUNNING] = 0


def describe_flight(path: Path) -> str:
    """What a FlightRecorder has left, as a few lines of text; empty when there is nothing."""
    if not path.exists() or path.stat().st_size < 8 * len(_Field):
        return ""
    cells = np.fromfile(path, np.int64)
    state = {field.name.lower(): int(cells[field]) for field in _Field}
    if state["magic"] != _MAGIC:
        return ""
    rows = cells[len(_Field) :].reshape(3, -1)[:, : state["sequences"]].T.tolist()
    where = "in" if state["is_running"] else "after"
    before = " or the one before" if state["is_running"] and state["num_before"] else ""
    lines = [
        f"Engine {where} step {state['step']}{before}: {state['sequences']} sequences, {state['tokens']} tokens; "
        f"{state['waiting']} waiting, {state['parked']} of them for a prefix; pages: {state['pages_free']} free, "
        f"{state['pages_cached']} cached, {state['pages_active']} active",
        *(f"  request {i}: {computed} of {tokens} tokens computed" for i, tokens, computed in rows[:_MAX_SHOWN]),
    ]
    if len(rows) > _MAX_SHOWN:
        lines.append(f"  and {len(rows) - _MAX_SHOWN} more")
    return "\n".join(lines)
