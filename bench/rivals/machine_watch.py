"""Who else uses the processors: /proc, read before and after a run."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
QUIET_CORES = 0.12
"""Others that take less than this many cores do not disturb a run that takes all."""
_LOOK_S = 1.5


@dataclass(frozen=True, slots=True)
class Reading:
    """CPU seconds since boot, and of one tree of processes since it began."""

    at: float
    busy_s: float
    steal_s: float
    tree_s: float


@dataclass(frozen=True, slots=True)
class Usage:
    """What happened between two readings."""

    seconds: float
    tree_cpu_s: float  # of the watched processes
    other_cores: float  # cores that all other processes took, on average
    steal_cores: float  # cores that the hypervisor gave to others

    @property
    def is_quiet(self) -> bool:
        """Nobody else took part worth mentioning."""
        return max(self.other_cores, self.steal_cores) < QUIET_CORES


@dataclass(frozen=True, slots=True)
class MachineWatch:
    """Reads /proc; tests give another root and another clock."""

    proc: Path = Path("/proc")
    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep

    def read(self, pid: int) -> Reading:
        """Now, with the tree of processes that begins at `pid`."""
        # cpu user nice system idle iowait irq softirq steal …
        ticks = [int(x) for x in (self.proc / "stat").read_text().split("\n", 1)[0].split()[1:]]
        busy = sum(ticks[0:3]) + sum(ticks[5:7])
        return Reading(self.clock(), busy / _TICKS_PER_S, ticks[7] / _TICKS_PER_S, self._tree_cpu_s(pid))

    def usage(self, before: Reading, after: Reading) -> Usage:
        """Cores are averages over the time between the readings; never below 0, though ticks are coarse."""
        seconds = max(1e-9, after.at - before.at)
        tree = after.tree_s - before.tree_s
        others = max(0.0, after.busy_s - before.busy_s - tree) / seconds
        return Usage(seconds, tree, others, (after.steal_s - before.steal_s) / seconds)

    def wait_until_quiet(self, limit_s: float) -> bool:
        """Wait until all processes together leave the machine alone for a moment; False when they never do."""
        end = self.clock() + limit_s
        before = self.read(0)
        while True:
            self.sleep(_LOOK_S)
            after = self.read(0)
            if self.usage(before, after).is_quiet:
                return True
            if after.at >= end:
                return False
            before = after

    def peak_rss_bytes(self, pid: int) -> int:
        """The most memory each process of the tree has ever held, added up."""
        return sum(self._peak_of(p) for p in self._tree(pid))

    def _tree(self, pid: int) -> Iterator[int]:
        if pid <= 0:
            return
        yield pid
        for children in (self.proc / str(pid) / "task").glob("*/children"):
            try:
                below = children.read_text().split()
            except OSError:  # the thread has ended
                continue
            for child in below:
                yield from self._tree(int(child))

    def _tree_cpu_s(self, pid: int) -> float:
        ticks = 0
        for process in self._tree(pid):
            try:
                fields = (self.proc / str(process) / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended; its parent has its time
                continue
            ticks += sum(int(x) for x in fields[11:15])  # utime stime, and cutime cstime of its ended children
        return ticks / _TICKS_PER_S

    def _peak_of(self, pid: int) -> int:
        try:
            lines = (self.proc / str(pid) / "status").read_text().splitlines()
        except OSError:
            return 0
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
