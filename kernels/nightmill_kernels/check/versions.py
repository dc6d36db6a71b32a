"""Other versions of triton, each in a folder of its own in the user's cache."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from nightmill_kernels.cpu.loader import cache_dir

INSTALLED = "installed"


class VersionError(RuntimeError):
    """A version of triton that cannot be had."""


def triton_dir(version: str) -> Path | None:
    """The folder that holds a version, fetched by pip when it is not there; None for the installed one.

    Raises:
        VersionError: It cannot be fetched.
    """
    if version == INSTALLED:
        return None
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise VersionError(f"{version!r} is no version of triton: give {INSTALLED}, or one like 3.6.0")
    base = cache_dir()
    if base is None:
        raise VersionError("there is no cache folder of your own for another triton: set NIGHTMILL_CACHE to one")
    target = base / f"triton-{version}-cp{sys.version_info.major}{sys.version_info.minor}"
    if not target.is_dir():
        _install(version, target)
    return target


def _install(version: str, target: Path) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=target.name, dir=target.parent))
    try:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:"]
        done = subprocess.run(
            [*command, "--target", str(scratch), f"triton=={version}"], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise VersionError(f"pip cannot install triton {version}: {done.stderr.strip()[-500:]}")
        try:
            os.rename(scratch, target)  # noqa: PTH104  # one step, so that a folder with the name is whole
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
