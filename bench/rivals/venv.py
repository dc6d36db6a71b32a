"""Virtual environments of the rivals: one each, built once, built anew when what goes into it has changed."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

from bench.rivals.rival import PipInstall

Say = Callable[[str], None]
_STAMP = "built.json"
_HEARTBEAT_S = 30.0
_REQUIREMENTS = """
import importlib.metadata, json, sys
print(json.dumps(importlib.metadata.requires(sys.argv[1]) or []))
"""


class InstallError(Exception):
    """An engine could not be installed; the message is for the report."""


def ready_venv(folder: Path, installs: Iterable[PipInstall], say: Say) -> Path:
    """The Python of a virtual environment in `folder` that holds what `installs` put there, in their order.

    Raises:
        InstallError: pip failed; its output is in `folder`.log.
    """
    steps = tuple(installs)
    recipe = json.dumps([sys.version, *(asdict(step) for step in steps)], indent=1, default=dict)
    digest = hashlib.sha256(recipe.encode()).hexdigest()
    python = folder / "bin" / "python"
    stamp = folder / _STAMP
    if stamp.is_file() and json.loads(stamp.read_text())["recipe"] == digest:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_suffix(".log")
    log.write_text("")
    _run([sys.executable, "-m", "venv", str(folder)], log, f"{folder.name}: making the virtual environment", {}, say)
    for number, step in enumerate(steps, start=1):
        arguments = [*step.arguments, *(_requirements(python, step) if step.requirements_of else ())]
        what = f"what {step.requirements_of} requires" if step.requirements_of else " ".join(step.arguments)
        title = f"{folder.name}, step {number} of {len(steps)}: pip install {what}"
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
        _run([*command, *arguments], log, title, dict(step.environment), say)
    stamp.write_text(json.dumps({"recipe": digest}))
    return python


def _requirements(python: Path, step: PipInstall) -> list[str]:
    found = subprocess.run(
        [str(python), "-c", _REQUIREMENTS, step.requirements_of], capture_output=True, text=True, check=False
    )
    if found.returncode != 0:
        raise InstallError(f"{step.requirements_of} is not in {python.parent.parent} after its installation")
    return wanted(json.loads(found.stdout), step.without)


def wanted(requirements: Iterable[str], without: Iterable[str]) -> list[str]:
    """Those of a distribution's requirements that belong to no extra and name none of `without`."""
    unwanted = {_plain(name) for name in without}
    return [
        text
        for text in requirements
        if not re.search(r";.*\bextra\s*==", text)
        and _plain(re.split(r"[^\w.-]", text.strip(), maxsplit=1)[0]) not in unwanted
    ]


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _run(command: list[str], log: Path, title: str, environment: dict[str, str], say: Say) -> None:
    started = time.monotonic()
    say(title)
    with log.open("a") as output:
        output.write(f"$ {' '.join(command)}\n")
        output.flush()
        child = subprocess.Popen(
            command, env=os.environ | environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            while True:
                try:
                    code = child.wait(timeout=_HEARTBEAT_S)
                    break
                except subprocess.TimeoutExpired:
                    say(f"… {time.monotonic() - started:.0f} s")
        finally:
            if child.poll() is None:
                child.kill()
    if code != 0:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.lstrip().lower().startswith("error")]
        raise InstallError(f"pip failed: {(errors or lines)[-1].strip()} (all of it: {log})")
