"""The mark beside the checkpoints: what was in the engine, and who is suspected of ending the process."""

from pathlib import Path

import pytest

from nightmill.output.folder import OutputFolder, shard_folder
from nightmill.storage import LocalStorage
from nightmill_worker.inflight import InflightMark, windows


@pytest.fixture
def folder(tmp_path: Path) -> OutputFolder:
    return OutputFolder(str(tmp_path / "out"), "job")


def mark(folder: OutputFolder) -> InflightMark:
    """What the next attempt sees."""
    attempt = InflightMark(LocalStorage(), folder.work, 0)
    found = LocalStorage().list(shard_folder(folder.work, 0))
    attempt.read({Path(info.uri).name for info in found})
    return attempt


def test_a_first_attempt_has_no_history(folder: OutputFolder) -> None:
    first = mark(folder)
    assert not first.covers(0)
    assert first.suspects({0, 1}, num_failures=9) == ()


def test_the_next_attempt_knows_what_had_started_in_whatever_order(folder: OutputFolder) -> None:
    first = mark(folder)
    first.start([500, 7, 501])
    first.start([9])
    first.write()
    again = mark(folder)
    assert [again.covers(row) for row in (0, 7, 8, 9, 499, 500, 501, 502)] == [
        *(False, True, False, True),
        *(False, True, True, False),
    ]


def test_what_is_durable_is_not_lost(folder: OutputFolder) -> None:
    first = mark(folder)
    first.start(range(20))
    first.write()
    first.settle(range(10))
    first.start([30])
    first.write()
    assert [row for row in range(40) if mark(folder).covers(row)] == [*range(10, 20), 30]


def test_what_was_lost_once_and_not_begun_again_is_still_lost(folder: OutputFolder) -> None:
    mark(folder).start([3])
    second = mark(folder)
    second.start([8])
    second.write()
    assert [row for row in range(10) if mark(folder).covers(row)] == [3, 8]


def test_the_mark_stays_small(folder: OutputFolder) -> None:
    first = mark(folder)
    for start in range(0, 100_000, 1000):
        first.start(range(start, start + 1000))
        first.settle(range(start, start + 900))
    first.write()
    (path,) = Path(folder.root).rglob("inflight.json")
    assert path.stat().st_size < 5000


def test_two_deaths_make_suspects_of_what_was_inside(folder: OutputFolder) -> None:
    mark(folder).start([7, 3])
    missing = {3, 7, 9, 12}
    assert mark(folder).suspects(missing, num_failures=1) == ()
    assert mark(folder).suspects(missing, num_failures=2) == (3, 7)  # 9 waited


def test_a_window_outlives_other_rows_running(folder: OutputFolder) -> None:
    first = mark(folder)
    first.start([3, 5, 7, 9])
    first.begin_window((3, 7))
    second = mark(folder)
    second.start([40])
    second.write()
    assert mark(folder).suspects({3, 7, 9, 50}, num_failures=0) == (3, 7)


def test_other_suspects_are_parked_until_the_window_is_searched(folder: OutputFolder) -> None:
    first = mark(folder)
    first.start([3, 4, 5, 6])
    first.begin_window((3, 4))
    second = mark(folder)
    assert second.suspects(missing := {3, 4, 5, 6, 9}, num_failures=1) == (3, 4)
    assert second.parked(missing, (3, 4)) == (5, 6)  # 9 was never inside
    assert second.parked(missing, ()) == ()
    second.settle([3, 4])
    assert mark(folder).suspects({5, 6, 9}, num_failures=2) == (5, 6), "a window that is done hides nobody"


def test_one_row_is_convicted_after_two_deaths_alone(folder: OutputFolder) -> None:
    for convicted in (False, False, True):
        attempt = mark(folder)
        attempt.start([7, 9])
        assert attempt.is_convicted((7,)) is convicted
        attempt.begin_window((7,))
    assert not mark(folder).is_convicted((8,))


def test_an_orderly_end_is_no_death(folder: OutputFolder) -> None:
    for _ in range(4):
        attempt = mark(folder)
        assert not attempt.is_convicted((7,))
        attempt.begin_window((7,))
        attempt.end_in_order()


def test_a_finished_window_clears_everybody(folder: OutputFolder) -> None:
    first = mark(folder)
    first.begin_window((3, 7))
    first.end_windows()
    assert mark(folder).suspects({3, 7}, num_failures=0) == ()


def test_an_unreadable_mark_is_no_mark(folder: OutputFolder) -> None:
    mark(folder).start([0])
    (path,) = Path(folder.root).rglob("inflight.json")
    path.write_text("{")
    assert not mark(folder).covers(0)


def test_windows_are_halves() -> None:
    assert windows(range(5)) == [(0, 1, 2), (3, 4)]
    assert windows([7]) == [(7,)]
    assert windows([]) == []
