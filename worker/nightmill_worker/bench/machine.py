"""What a figure was measured on: without it a figure means nothing."""

import os
import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Machine:
    """Processor, software versions and commit of a measurement."""

    cpu: str
    num_cpus: int
    python: str
    versions: dict[str, str]
    commit: str | None  # None outside a git checkout; ends with "+" when files are changed


def this_machine() -> Machine:
    """Describe the machine and checkout this process runs on."""
    return Machine(
        cpu=_cpu_name(),
        num_cpus=_num_cpus(),
        python=platform.python_version(),
        versions={name: _version(name) for name in ("nightmill", "torch", "transformers", "numpy")},
        commit=_commit(),
    )


def _num_cpus() -> int:
    """Of all threads together: those of a pinned engine have one each."""
    try:
        threads = [int(path.name) for path in Path("/proc/self/task").iterdir()]
    except OSError:
        return os.cpu_count() or 1
    return len(set[int]().union(*(os.sched_getaffinity(thread) for thread in threads)))


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str | None:
    here = Path(__file__).parent
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changed else "")
