"""Which processors the engine computes on, and what is left to the feeder: decided here, once, and said at the start.

On a CPU the engine's matrix products take every core, and the feeder works beside them: a row costs it well under a
millisecond, so a core of its own would idle. What must not happen is that its libraries bring a thread for every core,
too, or that two of the engine's threads share a core while they wait for each other: where an engine has a thread for
every core, each stays on its own (measured: 4 % less for a step, 10 % beside a feeder that takes a third of a core).
"""

import math
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

_SYSTEM = Path("/")
_FEEDER_SHARE = 8  # one thread of the feeder for so many of the engine's
# Any of them: whoever started us decides where threads stay.
_AFFINITY_SETTINGS = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_claims: set[int] = set()  # cores that this process's engine is pinned to, until the process ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    """What this process may use."""

    cpus: tuple[int, ...]  # of the affinity mask, ascending
    cores: tuple[int, ...]  # the first of `cpus` on each physical core
    quota: float | None  # processors' worth of time that the control group allows; None: no limit

    @property
    def num_usable(self) -> int:
        """Threads that can compute at once, each on a core of its own."""
        return len(self.cores) if self.quota is None else max(1, min(len(self.cores), math.ceil(self.quota)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CorePlan:
    """Who gets how many threads."""

    engine_threads: int
    feeder_threads: int  # of each of the feeder's thread pools: tokenizers', Arrow's
    num_cores: int  # that this process may use
    pinned: tuple[
        int, ...
    ] = ()  # processors, one for each of the engine's threads; empty: wherever the system puts them
    reason: str = ""  # what set the number of the engine's threads, where it is not the number of cores

    def __str__(self) -> str:
        """One line for the start of a run."""
        engine, cores = _count(self.engine_threads, "thread"), _count(self.num_cores, "core")
        reason = f" ({self.reason})" if self.reason else ", each on its own" if self.pinned else ""
        return f"engine: {engine} on {cores}{reason}; feeder: {_count(self.feeder_threads, 'thread')} beside it"

    def pin(self) -> None:
        """Keep OpenMP's threads where they are planned to be. Once torch is loaded it is too late: does nothing."""
        if self.pinned and "torch" not in sys.modules:
            os.environ["OMP_PLACES"] = ",".join(f"{{{cpu}}}" for cpu in self.pinned)
            os.environ["OMP_PROC_BIND"] = "close"


def find_cores(root: Path = _SYSTEM) -> Cores:
    """Read the affinity mask, the processors' topology and the control group's quota.

    Args:
        root: In place of `/`, for tests.
    """
    cpus = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else tuple(range(_num_cpus()))
    return Cores(cpus=cpus, cores=_first_of_each_core(cpus, root), quota=_quota(root))


def plan_cores(
    cores: Cores, *, num_threads: int | None = None, on_gpu: bool = False, environ: Mapping[str, str] | None = None
) -> CorePlan:
    """Decide. `num_threads` (--num-threads) goes before OMP_NUM_THREADS, that before the machine's cores."""
    environ = os.environ if environ is None else environ
    threads, reason = num_threads, "--num-threads"
    if threads is None:
        threads, reason = _number(environ.get("OMP_NUM_THREADS", "")), "OMP_NUM_THREADS"
    if threads is None:
        threads, reason = cores.num_usable, "the control group's CPU quota"
    if threads == len(cores.cores):
        reason = ""
    # On a GPU the engine's host side is one thread that mostly waits: the feeder may have the other cores.
    feeder = max(1, cores.num_usable - 1) if on_gpu else max(1, cores.num_usable // _FEEDER_SHARE)
    return CorePlan(engine_threads=threads, feeder_threads=feeder, num_cores=len(cores.cores), reason=reason)


def claim_cores(plan: CorePlan, cores: Cores, environ: Mapping[str, str] | None = None) -> CorePlan:
    """Pin the engine's threads, if it has one for every core and no other engine is pinned to any of them.

    With fewer, two engines could meet on one core and leave another idle. The claim ends with this process.
    """
    environ = os.environ if environ is None else environ
    wanted = cores.cores
    if plan.engine_threads != len(wanted) or len(wanted) < 2 or any(environ.get(name) for name in _AFFINITY_SETTINGS):
        return plan
    fresh: dict[int, socket.socket] = {}
    for cpu in wanted:
        if cpu in _claims:
            continue
        try:
            fresh[cpu] = _claim(cpu)
        except OSError:  # another engine has it, or this is no Linux
            for claim in fresh.values():
                claim.close()
            return plan
    for cpu, claim in fresh.items():
        claim.detach()  # nobody closes it any more
        _claims.add(cpu)
    return replace(plan, pinned=wanted)


def _claim(cpu: int) -> socket.socket:
    """A name that one process of the machine can have at a time, and that goes with it."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0nightmill-core-{cpu}")
    except OSError:
        claim.close()
        raise
    return claim


def limit_feeder(plan: CorePlan) -> None:
    """Bound the thread pools of this process's libraries. Before their first use; the environment goes before."""
    import pyarrow

    os.environ.setdefault("RAYON_NUM_THREADS", str(plan.feeder_threads))  # the tokenizers' library
    pyarrow.set_cpu_count(plan.feeder_threads)
    pyarrow.set_io_thread_count(max(2, plan.feeder_threads))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _num_cpus() -> int:
    return os.cpu_count() or 1


def _first_of_each_core(cpus: tuple[int, ...], root: Path) -> tuple[int, ...]:
    seen: set[str] = set()
    firsts = []
    for cpu in cpus:
        siblings = _read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu)
        if siblings not in seen:
            seen.add(siblings)
            firsts.append(cpu)
    return tuple(firsts)


def _quota(root: Path) -> float | None:
    """The tightest of the groups that this process is in."""
    limits = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if not controllers:
            limits += [_quota_v2(path) for path in _upwards(root / "sys/fs/cgroup", group)]
        elif "cpu" in controllers.split(","):
            limits += [_quota_v1(path) for path in _upwards(root / "sys/fs/cgroup/cpu", group)]
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None


def _upwards(mount: Path, group: str) -> list[Path]:
    """The group's directory and those above it. In a container its path may not exist: then the mount is the group."""
    path = mount / group.lstrip("/")
    return [path, *[above for above in path.parents if above == mount or mount in above.parents]]


def _quota_v2(path: Path) -> float | None:
    words = (_read(path / "cpu.max") or "").split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0] != "max" else None


def _quota_v1(path: Path) -> float | None:
    quota, period = (_read(path / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return int(quota) / int(period) if quota and period and int(quota) > 0 else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _number(text: str) -> int | None:
    """The outermost level of OMP_NUM_THREADS."""
    first = text.partition(",")[0].strip()
    return int(first) if first.isdigit() and int(first) > 0 else None
