"""The cache of models on this machine: entries appear whole or not at all."""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp

from nightmill.errors import ModelError


def cached_directory(root: Path, key: str, build: Callable[[Path], None]) -> Path:
    """Return the entry `key` of the cache at `root`, calling `build(empty directory)` first when it is not there.

    An entry's name exists only after every file in it has reached the disk: whoever sees the directory may use it.
    Several processes may ask at once: one builds, the others wait for it (the lock goes with the process that held
    it, so a killed builder does not block the next one).

    Raises:
        ModelError: the cache cannot be written. Errors of `build` pass through, and leave nothing behind.
    """
    final = root / "models" / key
    if final.is_dir():
        return final
    try:
        with _locked(root / "locks" / f"{key}.lock"):
            if not final.is_dir():
                _build_and_publish(root / "tmp", key, final, build)
    except OSError as error:
        raise ModelError(
            f"cannot write the model cache at {root}: {error}",
            hint="free some space or set NIGHTMILL_CACHE to a folder that can be written",
        ) from error
    return final


def _build_and_publish(scratch: Path, key: str, final: Path, build: Callable[[Path], None]) -> None:
    scratch.mkdir(parents=True, exist_ok=True)
    final.parent.mkdir(parents=True, exist_ok=True)
    # We hold the key's lock, so what is here was left by a builder that died.
    for leftover in scratch.glob(f"{key}.*"):
        shutil.rmtree(leftover, ignore_errors=True)
    work = Path(mkdtemp(prefix=f"{key}.", dir=scratch))
    try:
        build(work)
        _settle(work)
        work.rename(final)
        _sync(final.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _settle(directory: Path) -> None:
    """Give the tree the usual modes (mkdtemp and some writers use 0700/0600) and flush it to the disk."""
    umask = os.umask(0)
    os.umask(umask)
    for path in sorted(directory.rglob("*"), reverse=True):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)
        _sync(path)
    directory.chmod(0o777 & ~umask)
    _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
