import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from nightmill.worker_lock import WorkerLock, new_worker_id, sweep_dead

HOLD = """
import sys
from pathlib import Path
from nightmill.worker_lock import WorkerLock
WorkerLock(Path(sys.argv[1]), sys.argv[2]).acquire()
sys.stdout.write("held\\n"); sys.stdout.flush()
sys.stdin.read()
"""


def hold_in_child(directory: Path, worker_id: str) -> subprocess.Popen[bytes]:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory), worker_id], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"held\n"
    return child


def end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.communicate()


def buried(directory: Path) -> list[str]:
    told: list[str] = []
    assert sweep_dead(directory, told.extend) == told
    return told


def test_a_living_worker_is_left_alone_and_a_killed_one_is_found_once(tmp_path: Path) -> None:
    child = hold_in_child(tmp_path, "w1")
    assert buried(tmp_path) == []
    end(child)
    assert buried(tmp_path) == ["w1"]
    assert buried(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_our_own_lock_is_not_free(tmp_path: Path) -> None:
    with WorkerLock(tmp_path, "me"):
        assert buried(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_release_twice_is_once(tmp_path: Path) -> None:
    lock = WorkerLock(tmp_path, "me").acquire()
    lock.release()
    lock.release()


def test_an_id_is_held_once(tmp_path: Path) -> None:
    with WorkerLock(tmp_path, "me"), pytest.raises(FileExistsError):
        WorkerLock(tmp_path, "me").acquire()
    WorkerLock(tmp_path, "me").acquire().release()


def test_when_the_burial_fails_the_dead_are_found_again(tmp_path: Path) -> None:
    end(hold_in_child(tmp_path, "w1"))

    def fail(_: Sequence[str]) -> None:
        raise RuntimeError("database is away")

    with pytest.raises(RuntimeError):
        sweep_dead(tmp_path, fail)
    assert buried(tmp_path) == ["w1"]


def test_no_folder_means_nobody(tmp_path: Path) -> None:
    assert buried(tmp_path / "missing") == []


def test_other_files_are_not_workers(tmp_path: Path) -> None:
    (tmp_path / "readme.txt").write_text("mine")
    (tmp_path / "draft.tmp").write_text("")
    assert buried(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 2


def test_worker_ids_are_file_names_and_differ() -> None:
    first, second = new_worker_id(), new_worker_id()
    assert first != second
    assert "/" not in first
    assert str(os.getpid()) in first
    assert len(first) <= 120
