"""Runs sections one after the other, each in a process of its own with a limit, and writes the results after each."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from bench.gpu.namespace import ROOT
from bench.gpu.notebook import Check, Findings
from bench.gpu.section import ASSUMED, Ceilings, Section, Task

LEAST_SECONDS = 8.0
"""A section that is given less does nothing but start."""
TINY_PATIENCE = 4
_PATHS = ("jobs", "worker", "kernels", ".")


class Ending(StrEnum):
    """How a section ended."""

    DONE = "done"
    """By itself, with all of its checks passed."""
    FAILED = "failed"
    """By itself or by a crash; some check did not pass."""
    KILLED = "killed"
    """It was not done when its time was up; what it had found counts."""
    NOT_RUN = "not run"
    """No time was left for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A section and what came of it."""

    section: Section
    ending: Ending
    seconds: float
    findings: Findings
    output: str = ""  # the last lines it printed, where it did not end well

    @property
    def has_passed(self) -> bool:
        """Its checks can be relied on."""
        return self.ending is Ending.DONE and all(check.passed for check in self.findings.checks)


@dataclass(kw_only=True)
class Conductor:
    """One run of the script.

    Args:
        folder: For results and what sections leave.
        is_tiny: Tiny shapes, on the CPU.
        deadline_s: For all sections together, from `started_at`.
        without: Switches that are off in all sections.
        report: Called with all outcomes so far, after each section.
    """

    folder: Path
    is_tiny: bool
    deadline_s: float
    report: Callable[[Sequence[Outcome]], None]
    without: Sequence[str] = ()
    started_at: float = field(default_factory=time.monotonic)
    outcomes: list[Outcome] = field(default_factory=list)

    def run(self, sections: Sequence[Section]) -> list[Outcome]:
        """Run them all, whatever becomes of any."""
        with tempfile.TemporaryDirectory(prefix="nightmill-gpu-") as scratch:
            for section in sections:
                self.outcomes.append(self._run(section, Path(scratch)))
                self.report(self.outcomes)
        return self.outcomes

    def _run(self, section: Section, scratch: Path) -> Outcome:
        # A rehearsal on a busy machine takes as long as it takes, unless it hangs.
        limit = min(section.limit_s * (TINY_PATIENCE if self.is_tiny else 1), self.deadline_s - self._elapsed())
        if limit < LEAST_SECONDS:
            self._say(f"== {section.name}: not run, no time is left")
            return Outcome(section=section, ending=Ending.NOT_RUN, seconds=0.0, findings=Findings())
        self._say(f"== {section.name}: {section.what} (at most {limit:.0f} s)")
        notebook, task_file = scratch / f"{section.name}.json", scratch / f"{section.name}.task"
        Task(
            module=section.module,
            notebook=notebook,
            folder=self.folder,
            # It should stop by itself, and be told so, before it is stopped.
            seconds=limit - 3,
            is_tiny=self.is_tiny,
            ceilings=self._ceilings(),
            without=list(self.without),
        ).save(task_file)
        begun = time.monotonic()
        code, lines = self._watch(task_file, limit, section.name)
        seconds = time.monotonic() - begun
        findings = _read(notebook)
        if code is None:
            ending = Ending.KILLED
            findings.checks.append(Check(name="ended in time", passed=False, detail=f"killed after {seconds:.0f} s"))
        elif code != 0 and all(check.passed for check in findings.checks):
            detail = f"exit code {code}; last line: {lines[-1] if lines else 'none'}"
            findings.checks.append(Check(name="ran to its end", passed=False, detail=detail))
            ending = Ending.FAILED
        else:
            ending = Ending.DONE if all(check.passed for check in findings.checks) else Ending.FAILED
        self._say(f"== {section.name}: {ending} after {seconds:.1f} s")
        tail = "" if ending is Ending.DONE else "\n".join(lines[-40:])
        return Outcome(section=section, ending=ending, seconds=seconds, findings=findings, output=tail)

    def _watch(self, task_file: Path, limit: float, name: str) -> tuple[int | None, list[str]]:
        """The child's exit code, None when it was killed; and its lines."""
        lines: list[str] = []
        child = subprocess.Popen(
            [sys.executable, "-u", "-m", "bench.gpu.child", str(task_file)],
            cwd=ROOT,
            env=_environment(self.is_tiny),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            process_group=0,  # its own children are killed with it
        )
        reader = threading.Thread(target=self._follow, args=(child, lines, name), daemon=True)
        reader.start()
        try:
            code: int | None = child.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            # Also what a child that has ended left running: it would hold the device's memory.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            # One that waits for a device that hangs may outlive its killing; the others shall run all the same.
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=20)
        reader.join(timeout=5)
        return code, lines

    def _follow(self, child: "subprocess.Popen[str]", lines: list[str], name: str) -> None:
        assert child.stdout is not None
        with child.stdout as output:
            for line in output:
                lines.append(line.rstrip())
                self._say(f"{name}: {line.rstrip()}")

    def _ceilings(self) -> Ceilings:
        """As the probe measured them, if it did."""
        found = {
            figure.name: figure.value
            for outcome in self.outcomes
            if outcome.section.name == "probe"
            for figure in outcome.findings.figures
        }
        if self.is_tiny or not {"copy bandwidth", "GEMM 8192³ bf16"} <= found.keys():
            return ASSUMED
        return Ceilings(
            bytes_per_s=found["copy bandwidth"] * 1e9, flops=found["GEMM 8192³ bf16"] * 1e12, is_measured=True
        )

    def _elapsed(self) -> float:
        return time.monotonic() - self.started_at

    def _say(self, text: str) -> None:
        line = f"[{self._elapsed():6.1f} s] {text}"
        print(line, flush=True)
        with (self.folder / "log.txt").open("a") as log:
            log.write(line + "\n")


def _read(notebook: Path) -> Findings:
    try:
        return Findings.from_json(notebook.read_text())
    except (OSError, ValueError, KeyError, TypeError):  # it ended before it had begun
        return Findings()


def _environment(is_tiny: bool) -> dict[str, str]:
    paths = [str(ROOT / path) for path in _PATHS]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    # Triton reads this when it is imported: with it, kernels run in an interpreter.
    env.pop("TRITON_INTERPRET", None)
    if is_tiny:
        env["TRITON_INTERPRET"] = "1"
        env["CUDA_VISIBLE_DEVICES"] = ""
    return env
