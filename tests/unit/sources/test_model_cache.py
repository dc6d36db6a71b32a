import os
import signal
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nightmill.errors import ModelError
from nightmill_worker.model.cache import cached_directory

_BUILDER = """
import os, sys
from pathlib import Path
from nightmill_worker.model.cache import cached_directory

def build(directory):
    (directory / "half").write_text("x")
    print("building", flush=True)
    sys.stdin.readline()
    (directory / "whole").write_text("y")

print(cached_directory(Path(sys.argv[1]), "entry", build), flush=True)
"""


def _start_builder(root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _BUILDER, str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )


def _write(directory: Path) -> None:
    (directory / "config.json").write_text("{}")


def test_builds_once_and_then_uses_the_entry(tmp_path: Path) -> None:
    first = cached_directory(tmp_path, "entry", _write)

    def refuse(directory: Path) -> None:
        raise AssertionError("built again")

    assert cached_directory(tmp_path, "entry", refuse) == first
    assert (first / "config.json").read_text() == "{}"


def test_files_get_the_usual_modes(tmp_path: Path) -> None:
    def build(directory: Path) -> None:
        _write(directory)
        (directory / "config.json").chmod(0o600)

    entry = cached_directory(tmp_path, "entry", build)
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((entry / "config.json").stat().st_mode) == 0o666 & ~umask
    assert stat.S_IMODE(entry.stat().st_mode) == 0o777 & ~umask


@pytest.mark.parametrize("error", [ValueError("bad file"), KeyboardInterrupt()])
def test_a_failed_build_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    def build(directory: Path) -> None:
        _write(directory)
        raise error

    with pytest.raises(type(error)):
        cached_directory(tmp_path, "entry", build)
    assert not (tmp_path / "models" / "entry").exists()
    assert list((tmp_path / "tmp").iterdir()) == []
    cached_directory(tmp_path, "entry", _write)


def test_a_killed_builder_leaves_no_entry_and_blocks_nobody(tmp_path: Path) -> None:
    with _start_builder(tmp_path) as builder:
        assert builder.stdout is not None
        assert builder.stdout.readline() == "building\n"
        builder.send_signal(signal.SIGKILL)
    assert not (tmp_path / "models" / "entry").exists()
    entry = cached_directory(tmp_path, "entry", _write)
    assert [path.name for path in entry.iterdir()] == ["config.json"]
    assert list((tmp_path / "tmp").iterdir()) == []


def test_processes_that_race_build_once(tmp_path: Path) -> None:
    with _start_builder(tmp_path) as first:
        assert first.stdout is not None
        assert first.stdin is not None
        assert first.stdout.readline() == "building\n"
        with _start_builder(tmp_path) as second:
            first.stdin.write("\n")
            first.stdin.flush()
            entry = first.stdout.readline()
            assert second.stdout is not None
            assert second.stdout.readline() == entry  # and never "building"
    assert (Path(entry.strip()) / "whole").exists()


def test_threads_that_race_build_once(tmp_path: Path) -> None:
    built = []

    def build(directory: Path) -> None:
        built.append(directory)
        _write(directory)

    with ThreadPoolExecutor(4) as threads:
        entries = set(threads.map(lambda _: cached_directory(tmp_path, "entry", build), range(8)))
    assert len(entries) == 1
    assert len(built) == 1


def test_a_cache_that_cannot_be_written_is_a_model_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="NIGHTMILL_CACHE"):
        cached_directory(tmp_path / "file", "entry", _write)
