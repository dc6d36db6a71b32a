"""One process of a service: started as another user, logged to a file, ended by its own pid and nobody else's."""

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from deploy.native.failure import ServiceError, log_tail

# The parent-death signal goes by thread: a child dies with the *thread* that started it. This one lives as we do.
_SPAWNER = ThreadPoolExecutor(1, "spawner")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What to start and how it ends."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: Path
    log: Path  # stdout and stderr are appended
    user: str | None = None  # run as this user when we are root; None: as ourselves
    chroot: Path | None = None
    stop_signal: signal.Signals = signal.SIGTERM  # the graceful one
    orphan_signal: signal.Signals | None = signal.SIGKILL  # sent when we die; None: outlive us


class Process:
    """A running child in a session of its own."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self._popen: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The pid of the running process; raises ServiceError when there is none."""
        if self._popen is None:
            raise ServiceError(f"{self.command.name} is not running")
        return self._popen.pid

    @property
    def running(self) -> bool:
        """Whether the process has been started and has not ended."""
        return self._popen is not None and self._popen.poll() is None

    def start(self) -> None:
        """Start it; returns at once, not when it is ready (see `wait_until`)."""
        command = self.command
        with command.log.open("ab") as log:
            try:
                self._popen = _SPAWNER.submit(
                    subprocess.Popen,
                    [*_wrapper(command), *command.argv],
                    env=dict(command.env),
                    cwd=command.cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                ).result()
            except OSError as error:
                raise ServiceError(f"{command.name}: cannot start {command.argv[0]}: {error.strerror}") from error

    def wait_until(self, ready: Callable[[], bool], *, timeout_s: float) -> None:
        """Poll `ready` until it says yes.

        Raises:
            ServiceError: the process ended or the time was up; the text shows the end of its log.
        """
        deadline = time.monotonic() + timeout_s
        while not ready():
            if not self.running:
                code = None if self._popen is None else self._popen.returncode
                raise ServiceError(f"{self.command.name} ended with status {code}; {log_tail(self.command.log)}")
            if time.monotonic() > deadline:
                raise ServiceError(
                    f"{self.command.name} was not ready within {timeout_s:.0f} s; {log_tail(self.command.log)}"
                )
            time.sleep(0.05)

    def wait(self, *, timeout_s: float) -> int:
        """Wait for a process that ends by itself; returns its exit status. One that does not end is killed."""
        if self._popen is None:
            raise ServiceError(f"{self.command.name} is not running")
        try:
            return self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            self.kill()
            raise ServiceError(f"{self.command.name} did not end within {timeout_s:.0f} s") from error

    def stop(self, *, grace_s: float = 30.0) -> None:
        """Ask it to end with its graceful signal, then insist; returns when it is gone."""
        if self.running:
            self.signal(self.command.stop_signal)
        self._reap(grace_s)

    def kill(self) -> None:
        """SIGKILL the whole process group: what a crash looks like."""
        self._reap(0.0)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process itself; nothing happens when it has ended."""
        if self._popen is not None:
            self._popen.send_signal(number)

    def _reap(self, grace_s: float) -> None:
        if self._popen is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            if grace_s:
                self._popen.wait(grace_s)
        if self._popen.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()
        self._popen = None


def owner(user: str | None) -> tuple[int, int] | None:
    """(uid, gid) that files of a service of `user` need; None: leave them to whoever writes them."""
    if user is None or os.geteuid() != 0:
        return None
    try:
        entry = pwd.getpwnam(user)
    except KeyError as error:
        raise ServiceError(f"there is no user {user!r} on this machine", hint="run: make services") from error
    return entry.pw_uid, entry.pw_gid


def _wrapper(command: Command) -> list[str]:
    """setpriv changes the user first and sets the parent-death signal last: a change of user would clear it.

    It replaces itself by the service, so the pid is the service's. (A Python preexec_fn is not safe beside threads.)
    """
    words = [_tool("chroot"), str(command.chroot)] if command.chroot is not None else []
    options = []
    ids = owner(command.user)
    if ids is not None:
        options += [f"--reuid={ids[0]}", f"--regid={ids[1]}", "--clear-groups"]
    if command.orphan_signal is not None:
        options.append(f"--pdeathsig={command.orphan_signal.name.removeprefix('SIG')}")
    if options:
        words += ["setpriv" if command.chroot is not None else _tool("setpriv"), *options]
    return words


def _tool(name: str) -> str:
    path = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if path is None:
        raise ServiceError(f"there is no {name} on this machine; native services need Linux with util-linux")
    return path


def run_as(command: Command, *, timeout_s: float, stdin: str | None = None) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end as its user and return what it printed; its log is not used."""
    argv = [*_wrapper(command), *command.argv]
    try:
        return subprocess.run(
            argv,
            env=dict(command.env),
            cwd=command.cwd,
            input=stdin or "",
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ServiceError(f"{command.name} did not end within {timeout_s:.0f} s: {' '.join(command.argv)}") from error
