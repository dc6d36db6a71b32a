"""How an attempt stops: what the engine has finished is kept, also what it finished in the last moment."""

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nightmill.output.folder import OutputFolder
from nightmill.records import ShardLease, ShardRange
from nightmill.storage import LocalStorage
from nightmill_worker.drain import Drain
from nightmill_worker.shard import ShardRun
from nightmill_worker.solitude import Solitude


class LateMailbox:
    """Its one row ends just after the shard has looked for outcomes."""

    has_room = True
    running = 0
    must_flush = False

    def __init__(self, drain: Drain) -> None:
        self.in_engine = 1
        self._drain = drain
        self._outcomes: list[str] = []

    def collect(self, timeout_s: float, *, or_room: bool) -> list[str]:
        outcomes, self._outcomes = self._outcomes, []
        if self.in_engine:
            self.in_engine = 0
            self._outcomes = ["the row"]
            self._drain.request(signal.SIGTERM)
        return outcomes

    def take_started(self) -> list[int]:
        return []

    def note_unflushed(self, count: int) -> None:
        pass


def test_case_I082_a_row_that_ends_between_two_looks_of_a_drain_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drain = Drain()
    context: Any = SimpleNamespace(storage=LocalStorage(), folder=OutputFolder(str(tmp_path), "job"))
    lease = ShardLease(
        shard_id=1,
        job_id="job",
        worker_id="worker",
        attempt=1,
        num_failures=0,
        range=ShardRange(index=0, source_file="/in", row_start=0, row_end=2),
    )
    run = ShardRun(lease, context, SimpleNamespace(), drain, Solitude())  # type: ignore[arg-type]
    kept: list[Any] = []
    monkeypatch.setattr(run, "_take", kept.append)
    monkeypatch.setattr(run, "_requests", lambda *_: iter([["request"], ["never offered"]]))
    monkeypatch.setattr(run, "_offer", lambda *_: None)
    mailbox: Any = LateMailbox(drain)
    assert not run._answer_rows(mailbox, {0, 1}, last=True)
    assert kept == ["the row"]
