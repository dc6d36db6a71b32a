"""What every Storage must do. A new one is one more entry of BACKENDS."""

import contextlib
import errno
import random
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.contract.s3_stores import use_store
from tests.services.servers import S3Bucket

from nightmill.errors import StorageError
from nightmill.storage import (
    LocalStorage,
    ObjectExistsError,
    PreconditionFailedError,
    SourceChangedError,
    Storage,
    absolute,
    open_storage,
)

BACKENDS = ("local", "moto", "ceph")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Storage, str]:
    if request.param == "local":
        return LocalStorage(), str(tmp_path / "bucket")
    bucket: S3Bucket = request.getfixturevalue(f"{request.param}_s3")
    use_store(monkeypatch, bucket)
    root = f"s3://{bucket.bucket}/some/prefix"
    return open_storage(root), root


def create(storage: Storage, uri: str, data: bytes) -> str:
    with storage.stage(uri) as staged:
        staged.file.write(data)
        return staged.create().etag


def read(storage: Storage, uri: str) -> bytes:
    with storage.open_input(uri) as file:
        return bytes(file.read())


def test_create_then_read(backend: tuple[Storage, str]) -> None:
    storage, root = backend
    create(storage, f"{root}/a/b/x.bin", b"0123456789")
    assert read(storage, f"{root}/a/b/x.bin") == b"0123456789"


def test_ranged_reads(backend: tuple[Storage, str]) -> None:
    storage, root = backend
    create(storage, f"{root}/x.bin", b"0123456789")
    with storage.open_input(f"{root}/x.bin") as file:
        assert file.size() == 10
        file.seek(7)
        assert file.read(2) == b"78"
        file.seek(1)
        assert file.read(1) == b"1"


def test_parquet_through_staged_and_input(backend: tuple[Storage, str]) -> None:
    storage, root = backend
    table = pa.table({"a": list(range(1000))})
    with storage.stage(f"{root}/t.parquet") as staged:
        pq.write_table(table, staged.file)
        with staged.open_input() as stream:
            assert pq.ParquetFile(stream).metadata.num_rows == 1000
        staged.create()
    with storage.open_input(f"{root}/t.parquet") as stream:
        assert pq.read_table(stream).equals(table)


def test_create_never_overwrites(backend: tuple[Storage, str]) -> None:
    storage, root = backend
    create(storage, f"{root}/x", b"first")
    with pytest.raises(ObjectExistsError, match="x"):
        create(storage, f"{root}/x", b"second")
    assert read(storage, f"{root}/x") == b"first"


def test_one_of_sixteen_racing_creates_wins(backend: tuple[Storage, str]) -> None:
    storage, root = backend
    barrier, won = threading.Barrier(16), []

    def race(number: int) -> None:
        with storage.stage(f"{root}/x") as staged:
            staged.file.write(b"%d" % number)
            barrier.wait()
            try:
                staged.create()
            except ObjectExistsError:
                return
            won.append(number)

    threads = [threading.Thread(target=race, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert read(storage, f"{root}/x") == b"%d" % won[0]


def test_unpublished_is_invisible_and_leaves_nothing(backend: tuple[Storage, str]) -> None:
    storage, root = backend
    with storage.stage(f"{root}/x") as staged:
        staged.file.write(b"half")
        assert storage.stat(f"{root}/x") is None
        assert storage.list(root) == []
    assert storage.stat(f"{root}/x") is None
    assert storage.list(root) == []


def test_error_inside_publishes_nothing(backend: tuple[Storage, str]) -> None:
    storage, root = backend
    with pytest.raises(RuntimeError), storage.stage(f"{root}/x") as staged:  # noqa: PT012
        staged.file.write(b"half")
        raise RuntimeError
    assert storage.list(root) == []


def test_replace_needs_the_etag_it_expects(backend: tuple[Storage, str]) -> None:
    storage, root = backend
    old = create(storage, f"{root}/x", b"old")
    with storage.stage(f"{root}/x") as staged:
        staged.file.write(b"newer")
        new = staged.replace(etag=old).etag
    assert new != old
    with storage.stage(f"{root}/x") as staged, pytest.raises(PreconditionFailedError):
        staged.replace(etag=old)
    assert read(storage, f"{root}/x") == b"newer"


def test_replace_of_a_missing_object_with_etag_fails(backend: tuple[Storage, str]) -> None:
    storage, root = backend
    with pytest.raises(PreconditionFailedError), storage.stage(f"{root}/x") as staged:
        staged.replace(etag="some")
    assert storage.stat(f"{root}/x") is None


def test_replace_without_etag_writes_either_way(backend: tuple[Storage, str]) -> None:
    storage, root = backend
    for data in (b"one", b"two"):
        with storage.stage(f"{root}/x") as staged:
            staged.file.write(data)
            staged.replace()
        assert read(storage, f"{root}/x") == data


def test_list_is_sorted_recursive_and_agrees_with_stat(backend: tuple[Storage, str]) -> None:
    storage, root = backend
    for name in ("b", "a/2", "a/1", "c/d/e"):
        create(storage, f"{root}/{name}", name.encode())
    infos = storage.list(root)
    assert [info.uri.removeprefix(root + "/") for info in infos] == ["a/1", "a/2", "b", "c/d/e"]
    assert [storage.stat(info.uri) for info in infos] == infos
    assert storage.list(f"{root}/none") == []


def test_list_does_not_take_a_prefix_of_a_name_for_a_folder(backend: tuple[Storage, str]) -> None:
    storage, root = backend
    create(storage, f"{root}/shard-00001/x", b"")
    create(storage, f"{root}/shard-000012/x", b"")
    assert [info.uri for info in storage.list(f"{root}/shard-00001")] == [f"{root}/shard-00001/x"]


def test_etag_tells_a_change(backend: tuple[Storage, str]) -> None:
    storage, root = backend
    first = create(storage, f"{root}/x", b"aaaa")
    storage.delete(f"{root}/x")
    assert create(storage, f"{root}/x", b"bbbbb") != first


def test_delete_is_idempotent(backend: tuple[Storage, str]) -> None:
    storage, root = backend
    create(storage, f"{root}/x", b"")
    storage.delete(f"{root}/x")
    storage.delete(f"{root}/x")
    assert storage.stat(f"{root}/x") is None


def test_missing_object_is_named(backend: tuple[Storage, str]) -> None:
    storage, root = backend
    with pytest.raises(StorageError, match="missing"):
        storage.open_input(f"{root}/missing")


def test_remove_empty_folders_keeps_what_holds_something(backend: tuple[Storage, str]) -> None:
    storage, root = backend
    create(storage, f"{root}/w/a/x", b"")
    create(storage, f"{root}/w/b/y", b"")
    storage.delete(f"{root}/w/a/x")
    storage.remove_empty_folders(f"{root}/w")
    assert [info.uri for info in storage.list(root)] == [f"{root}/w/b/y"]


def test_what_was_opened_by_its_etag_is_that_version(backend: tuple[Storage, str]) -> None:
    storage, root = backend
    etag = create(storage, f"{root}/x", b"old")
    with storage.open_input(f"{root}/x", etag=etag) as file:
        assert file.read() == b"old"
    storage.delete(f"{root}/x")
    create(storage, f"{root}/x", b"newer")
    with pytest.raises(SourceChangedError, match="x was overwritten"):
        storage.open_input(f"{root}/x", etag=etag)


def test_large_objects_are_read_in_pieces(backend: tuple[Storage, str]) -> None:
    storage, root = backend
    data = random.Random(1).randbytes(9_000_000)
    create(storage, f"{root}/x", data)
    with storage.open_input(f"{root}/x") as file:
        assert file.size() == len(data)
        for start, length in [(0, 10), (5_000_000, 3_000_000), (8_999_990, 100), (3, 9_000_000), (9_000_000, 5)]:
            file.seek(start)
            assert file.read(length) == data[start : start + length]


def test_copy_puts_a_whole_object_in_the_others_place(backend: tuple[Storage, str]) -> None:
    storage, root = backend
    create(storage, f"{root}/a", b"one")
    create(storage, f"{root}/b/c", b"two")
    storage.copy(f"{root}/a", f"{root}/b/c")
    assert read(storage, f"{root}/b/c") == read(storage, f"{root}/a") == b"one"
    with pytest.raises(StorageError, match="none"):
        storage.copy(f"{root}/none", f"{root}/b/c")
    assert read(storage, f"{root}/b/c") == b"one"


def test_odd_names(backend: tuple[Storage, str]) -> None:
    storage, root = backend
    names = ["a b", "ä/ö", "per%20cent", "plus+and&=?#", "[x]*", "q'uote\"s", "日本/語.parquet"]
    for name in names:
        create(storage, f"{root}/{name}", name.encode())
    assert sorted(info.uri.removeprefix(f"{root}/") for info in storage.list(root)) == sorted(names)
    for name in names:
        assert read(storage, f"{root}/{name}") == name.encode()
        assert storage.stat(f"{root}/{name}") is not None


def test_one_of_sixteen_in_four_processes_wins(backend: tuple[Storage, str]) -> None:
    """No lock of ours may be what decides."""
    _, root = backend
    with contextlib.ExitStack() as stack:
        racers = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", RACER, f"{root}/x", str(number)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for number in range(4)
        ]
        assert [racer.stdout and racer.stdout.readline() for racer in racers] == ["ready\n"] * 4
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write("go\n")
            racer.stdin.flush()
        winners = [line for racer in racers for line in racer.communicate(timeout=60)[0].split()]
    assert len(winners) == 1
    assert read(open_storage(root), f"{root}/x") == winners[0].encode()


RACER = """
import sys
from concurrent.futures import ThreadPoolExecutor
from nightmill.storage import ObjectExistsError, open_storage
uri, process = sys.argv[1:]
storage = open_storage(uri)
assert storage.creates_atomically(uri.rpartition("/")[0])

def race(staged):
    try:
        staged.create()
    except ObjectExistsError:
        return None
    return staged.file

racers = {f"{process}-{thread}": storage.stage(uri) for thread in range(4)}
for name, staged in racers.items():
    staged.file.write(name.encode())
print("ready", flush=True)
sys.stdin.readline()
with ThreadPoolExecutor(4) as pool:
    for name, won in zip(racers, pool.map(race, racers.values())):
        if won:
            print(name)
"""


def test_equal_storages_are_one_key(backend: tuple[Storage, str]) -> None:
    _, root = backend
    assert open_storage(root) == open_storage(root)
    assert len({open_storage(root), open_storage(root)}) == 1


# The local disk.


def test_sweep_removes_what_a_killed_write_left(tmp_path: Path) -> None:
    code = (
        "import os, sys, signal; from nightmill.storage import LocalStorage\n"
        "staged = LocalStorage().stage(sys.argv[1]); staged.file.write(b'x' * 100_000)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "part-00000.parquet")], check=False)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".")
    assert not left.name.endswith(".parquet")
    (tmp_path / ".nightmill-mine").write_text("not a temporary of ours")
    (tmp_path / "empty").mkdir()
    LocalStorage().sweep(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".nightmill-mine", "empty"]


def test_sweep_leaves_what_is_being_written(tmp_path: Path) -> None:
    """Two processes end one job: the first must not sweep the second's manifest away."""
    storage = LocalStorage()
    with storage.stage(str(tmp_path / "x")) as staged:
        staged.file.write(b"data")
        storage.sweep(str(tmp_path))
        staged.create()
    assert read(storage, str(tmp_path / "x")) == b"data"


@pytest.mark.parametrize("when", ["write", "fsync"])
def test_full_disk_is_explained_and_leaves_nothing(when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def publish() -> None:
        with LocalStorage().stage(str(tmp_path / "p.parquet")) as staged:
            if when == "fsync":
                monkeypatch.setattr("nightmill.storage.local.os.fsync", full)
            staged.file.write(b"x")
            if when == "write":
                full()
            staged.create()

    with pytest.raises(StorageError) as caught:
        publish()
    for word in ("p.parquet", "no space left", "bytes free", "same command again"):
        assert word in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_file_size_limit_while_arrow_writes(tmp_path: Path) -> None:
    """The kernel refuses in the middle of a Parquet file: a real failed write, without a disk to fill."""
    code = f"""
import resource, sys, pyarrow as pa, pyarrow.parquet as pq
from nightmill.storage import LocalStorage
from nightmill.errors import StorageError
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, {resource.RLIM_INFINITY}))
table = pa.table({{"a": [str(i) * 20 for i in range(100_000)]}})
try:
    with LocalStorage().stage(sys.argv[1]) as staged:
        pq.write_table(table, staged.file, compression="none")
        staged.create()
except StorageError as error:
    assert "no space left" in str(error), error
    sys.exit(7)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "p.parquet")], check=False, capture_output=True)
    assert done.returncode == 7, done.stderr.decode()
    assert list(tmp_path.iterdir()) == []


def test_a_file_where_a_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(StorageError, match="out"):
        LocalStorage().stage(str(tmp_path / "out" / "x"))


def test_without_hard_links_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("nightmill.storage.local.os.link", refuse)
    with pytest.raises(StorageError, match="hard links"):
        create(LocalStorage(), str(tmp_path / "x"), b"")


def test_list_follows_links_and_ends(tmp_path: Path) -> None:
    (tmp_path / "data" / "a").mkdir(parents=True)
    (tmp_path / "data" / "a" / "x").write_text("")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "linked").symlink_to(tmp_path / "data")
    (tmp_path / "in" / "loop").symlink_to(tmp_path / "in")
    (tmp_path / "data" / "a" / "up").symlink_to(tmp_path / "data")
    storage = LocalStorage()
    assert [info.uri for info in storage.list(str(tmp_path / "in"))] == [f"{tmp_path}/in/linked/a/x"]
    (tmp_path / "in" / ".#lock").symlink_to("nowhere")
    assert len(storage.list(str(tmp_path / "in"))) == 1
    (tmp_path / "in" / "gone.parquet").symlink_to("nowhere")
    with pytest.raises(StorageError, match=r"gone\.parquet is a link"):
        storage.list(str(tmp_path / "in"))


def test_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert absolute("a/../b") == str(tmp_path / "b")
    assert absolute("file:///data/x") == "/data/x"
    assert absolute("~/x") == "/home/somebody/x"
    with pytest.raises(StorageError, match="empty"):
        absolute("")
    with pytest.raises(StorageError, match="gopher://"):
        absolute("gopher://x/y")
    with pytest.raises(StorageError, match="gopher://"):
        open_storage("gopher://x/y")
