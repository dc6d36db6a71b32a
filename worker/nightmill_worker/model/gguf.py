"""GGUF files: converted once, in a process of its own, into a directory of safetensors."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from nightmill.errors import ModelError
from nightmill_worker.model.cache import cached_directory

CONVERTER_VERSION = 1
"""Part of the cache key: raise it whenever the converted directory would come out different."""

EXIT_MODEL_ERROR = 3
"""Exit code of the converting process when the model is at fault: a ModelError, which it tells us."""

MARK = "nightmill-convert: "
"""Lines of the converting process that are for us begin so, then JSON."""


def gguf_model(path: Path, cache: Path, progress: Callable[[str], None]) -> Path:
    """Return the converted directory of a GGUF file; the key is the file's content, not its name.

    Raises:
        ModelError: not a GGUF file, or one that cannot be converted.
    """
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{path} is not a GGUF file: it does not begin with GGUF")
        file.seek(0)
        progress(f"reading {path.name}")
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return cached_directory(
        cache, f"gguf-{digest[:24]}-c{CONVERTER_VERSION}", lambda target: convert_gguf(path, target, progress)
    )


def convert_gguf(source: Path, target: Path, progress: Callable[[str], None]) -> None:
    """Write `source` as a model directory into the empty directory `target`.

    Runs in a child process: transformers, torch and the widened weights never enter this one.

    Raises:
        ModelError: with the converter's own words.
    """
    progress("converting the GGUF weights to bfloat16 (once)")
    command = [sys.executable, "-m", "nightmill_worker.model.gguf_convert", str(source), str(target)]
    # Nothing here may ask a hub, draw bars into our output or take a GPU another process is using.
    quiet = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error", "CUDA_VISIBLE_DEVICES": ""}
    child = subprocess.run(command, env=os.environ | quiet, capture_output=True, text=True, check=False)
    told = [json.loads(line.removeprefix(MARK)) for line in child.stdout.splitlines() if line.startswith(MARK)]
    for note in told:
        if "warning" in note:
            progress(f"warning: {note['warning']}")
    if child.returncode == EXIT_MODEL_ERROR:
        raise ModelError(told[-1]["message"], hint=told[-1]["hint"])
    if child.returncode == -signal.SIGKILL:
        raise ModelError(
            f"the process converting {source.name} was killed, most likely for want of memory",
            hint="it needs about twice the model's size in bfloat16: convert on a larger machine and copy the cache",
        )
    if child.returncode != 0:
        tail = "\n  ".join((child.stderr or child.stdout).strip().splitlines()[-4:])
        raise ModelError(
            f"{source.name} could not be converted (exit code {child.returncode}):\n  {tail}",
            hint="the model's architecture may not be one that transformers reads from GGUF; "
            "a directory of safetensors works for every architecture",
        )
