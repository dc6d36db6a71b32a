"""Who is alive on this machine: each worker holds a kernel lock on its own file until it ends, however it ends.

The kernel drops the lock on `kill -9` too, so a rerun takes over at once instead of waiting for the leases to run out.
"""

import fcntl
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

_SUFFIX = ".lock"


def new_worker_id() -> str:
    """`<host>-<pid>-<random>`: never used twice, fit for a file name."""
    host = "".join(c if c.isalnum() or c == "-" else "-" for c in socket.gethostname())[:40]
    return f"{host}-{os.getpid()}-{secrets.token_hex(4)}"


class WorkerLock:
    """Held from before the first claim to after the last release.

    The lock belongs to the open file: a *forked* child would hold it on after our death; spawned children do not.
    """

    def __init__(self, directory: Path, worker_id: str) -> None:
        self.worker_id = worker_id
        self._path = directory / f"{worker_id}{_SUFFIX}"
        self._fd: int | None = None

    def acquire(self) -> Self:
        """Lock a nameless-to-others file, then give it its name: a sweep never sees it unlocked.

        Raises:
            FileExistsError: the worker id is taken.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        draft = self._path.with_suffix(".tmp")
        fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.link(draft, self._path)  # unlike rename, refuses a name that is there
        except OSError:
            os.close(fd)
            raise
        finally:
            draft.unlink()
        self._fd = fd
        return self

    def release(self) -> None:
        """Remove the file and let go. Safe to call twice."""
        if self._fd is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> Self:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def sweep_dead(directory: Path, bury: Callable[[Sequence[str]], object]) -> list[str]:
    """Find workers that ended without releasing, give their ids to `bury`, then remove their files.

    The files go last: when `bury` fails, or we die in it, the next sweep finds them again.
    """
    dead: dict[str, int] = {}
    try:
        for path in sorted(directory.glob(f"*{_SUFFIX}")):
            fd = _lock_if_free(path)
            if fd is not None:
                dead[path.name.removesuffix(_SUFFIX)] = fd
        if dead:
            bury(list(dead))
        for worker_id in dead:
            (directory / f"{worker_id}{_SUFFIX}").unlink(missing_ok=True)
    finally:
        for fd in dead.values():
            os.close(fd)
    return list(dead)


def _lock_if_free(path: Path) -> int | None:
    try:
        fd = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    if _is_at(fd, path):
        return fd
    os.close(fd)
    return None


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False
