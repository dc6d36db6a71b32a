"""The kernels' tests on the device: bf16, fp16 and fp32 against the reference and fp64 oracles."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.gpu.namespace import ROOT
from bench.gpu.notebook import Notebook
from bench.gpu.section import Task

PROCESSES = 12
"""Most of the time goes into compiling kernels, on the host."""
TINY_TESTS = 6
SHOWN = 12


def run(notebook: Notebook, task: Task) -> None:
    path = task.notebook.with_name("ops-record.json")
    parallel = not task.is_tiny and importlib.util.find_spec("xdist") is not None
    record = _pytest(notebook, task, path, parallel=parallel)
    if parallel and not _count(record):
        notebook.note("no test ran in several processes: once more in one")
        record = _pytest(notebook, task, path, parallel=False)
    failed = record["failed"]
    total = _count(record)
    notebook.figure("tests passed", record["passed"], "", f"of {total}, {record['skipped']} skipped", headline=True)
    notebook.check("some tests ran", record["passed"] + len(failed) > 0)
    notebook.check("no kernel test failed", not failed, _in_short(failed) if failed else "")
    for name in list(failed)[:SHOWN]:
        notebook.note(f"{name}\n{failed[name]}")
    slowest = sorted(record["slowest"].items(), key=lambda item: -item[1])[:5]
    notebook.table("slowest tests", ["test", "s"], [[name, seconds] for name, seconds in slowest])
    if failed:
        notebook.file("ops-failures.txt", "\n\n".join(f"{name}\n{text}" for name, text in failed.items()))


def _pytest(notebook: Notebook, task: Task, path: Path, *, parallel: bool) -> dict[str, Any]:
    # tests/conftest.py wants services that are not installed on every machine with a GPU; below tests/ops nothing does.
    command = [
        *(sys.executable, "-m", "pytest", "tests/ops", "-m", "device", "--confcutdir=tests/ops", "-q", "--tb=short"),
        *("-p", "bench.gpu.pytest_record", "-p", "no:cacheprovider", f"--record={path}"),
    ]
    if parallel:
        command += ["-n", str(min(PROCESSES, os.cpu_count() or 1))]
    if task.is_tiny:
        command += [f"--take={TINY_TESTS}"]
    env = os.environ | ({} if task.is_tiny else {"NIGHTMILL_TEST_DEVICE": "cuda"})
    limit = max(5.0, notebook.seconds_left - 4)
    try:
        ended = subprocess.run(
            command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit
        )
        notebook.say("\n".join(ended.stdout.splitlines()[-25:]))
        # 5: no test is marked `device` yet, which the caller finds out by counting.
        ran = ended.returncode in (0, 1, 5)
        notebook.check("pytest itself ran", ran, "" if ran else (ended.stdout + ended.stderr)[-800:])
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
        tail = said if isinstance(said, str) else said.decode(errors="replace")
        notebook.say(tail[-1500:])
        notebook.check("the kernel tests ended in time", False, f"stopped after {limit:.0f} s")
    return json.loads(path.read_text()) if path.exists() else {"passed": 0, "skipped": 0, "failed": {}, "slowest": {}}


def _in_short(failed: dict[str, str]) -> str:
    """Which, and why the first: as much as the table that is printed last has room for."""
    names = [name.rpartition("::")[2].removesuffix(" (call)") for name in failed]
    reason = next((line for line in next(iter(failed.values())).splitlines() if line.strip()), "")
    return f"{len(failed)} failed: {', '.join(names[:6])}; the first: {reason}"[:380]


def _count(record: dict[str, Any]) -> int:
    return record["passed"] + record["skipped"] + len(record["failed"])
