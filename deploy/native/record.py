"""Processes that outlive the command that started them: written down, found again, and ended by pid."""

import contextlib
import os
import select
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deploy.native.process import Process


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRecord:
    """One process, told from a later one with the same pid by the time it started."""

    name: str
    pid: int
    started: int  # clock ticks since boot, from /proc
    stop_signal: int
    grace_s: float
    log: str

    @classmethod
    def of(cls, process: Process, *, grace_s: float) -> "ProcessRecord":
        """Of a process that runs now."""
        command = process.command
        started = _started(process.pid)
        return cls(
            name=command.name,
            pid=process.pid,
            started=-1 if started is None else started,
            stop_signal=int(command.stop_signal),
            grace_s=grace_s,
            log=str(command.log),
        )

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "ProcessRecord":
        """The reverse of `to_json`."""
        return cls(**value)

    def to_json(self) -> dict[str, Any]:
        """For a file."""
        return asdict(self)

    @property
    def alive(self) -> bool:
        """Whether this very process is still there (one that has ended but was not waited for is not)."""
        return _started(self.pid) == self.started

    def ask_to_stop(self) -> None:
        """Send the graceful signal; nothing happens when it is gone."""
        self._send(signal.Signals(self.stop_signal))

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has ended; False when it has not in time."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            if not self.alive:
                return True
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            return bool(poll.poll(max(0.0, timeout_s) * 1000))
        finally:
            os.close(handle)

    def kill_group(self) -> None:
        """SIGKILL it with its children; it leads a group of its own."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(self.pid)
            try:
                if self.alive:  # the handle holds the pid: it cannot become another's between look and signal
                    signal.pidfd_send_signal(handle, number)
            finally:
                os.close(handle)


def stop_all(records: list[ProcessRecord]) -> list[ProcessRecord]:
    """Ask all to stop at once and wait as long as the most patient one; returns those that had to be killed."""
    began = time.monotonic()
    for record in records:
        record.ask_to_stop()
    killed = []
    for record in records:
        if not record.wait(record.grace_s - (time.monotonic() - began)):
            record.kill_group()
            record.wait(10)
            killed.append(record)
    return killed


def _started(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None when there is none, or only its exit status is left."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *rest = text.rpartition(")")[2].split()  # the name before it may hold blanks and brackets
    return None if state in "ZX" else int(rest[18])
