"""What an attempt puts into its part: every durable row, whether it is still in memory or not."""

from pathlib import Path

import pytest

from nightmill.output.checkpoint import CheckpointReader, CheckpointWriter
from nightmill.records import Completion
from nightmill.storage import LocalStorage
from nightmill_worker import shard_answers
from nightmill_worker.shard_answers import ShardAnswers


def answer(row: int, text: str = "yes") -> Completion:
    return Completion(row_index=row, custom_id=str(row), text=text, finish_reason="stop", attempts=1, seed=2**64 - 1)


def answers(path: Path, attempt: int) -> ShardAnswers:
    return ShardAnswers(CheckpointWriter(LocalStorage(), str(path), 0, attempt))


def earlier(path: Path) -> CheckpointReader:
    return CheckpointReader(LocalStorage(), str(path), 0)


@pytest.mark.parametrize("held_chars", [2**18, 1000], ids=["in memory", "read back"])
def test_all_rows_of_this_attempt_and_of_earlier_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held_chars: int
) -> None:
    monkeypatch.setattr(shard_answers, "MAX_HELD_CHARS", held_chars)
    first = answers(tmp_path, 1)
    first.add(answer(0))
    first.flush()
    known = earlier(tmp_path)
    second = answers(tmp_path, 2)
    for row in range(1, 9):
        second.add(answer(row))
        if row % 3 == 0:
            assert list(second.flush()) == [row - 2, row - 1, row]
    second.flush()
    assert second.all(known) == {row: answer(row) for row in range(9)}


def test_few_rows_are_not_read_back(tmp_path: Path) -> None:
    known = earlier(tmp_path)
    mine = answers(tmp_path, 1)
    mine.add(answer(0))
    mine.flush()
    for file in tmp_path.rglob("ckpt-*"):
        file.write_bytes(b"")
    assert mine.all(known) == {0: answer(0)}


def test_what_a_zombie_writes_meanwhile_does_not_count(tmp_path: Path) -> None:
    known = earlier(tmp_path)
    zombie, mine = answers(tmp_path, 1), answers(tmp_path, 2)
    zombie.add(answer(0, "late"))
    zombie.flush()
    mine.add(answer(0, "mine"))
    mine.flush()
    assert mine.all(known) == {0: answer(0, "mine")}
