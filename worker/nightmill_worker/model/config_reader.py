"""A model's config, read by transformers in a process of its own and remembered.

transformers costs seconds and 90 MB to import, for one small record: the engine process never loads it. The record is
kept in the cache under everything it depends on: the model's files, transformers' version and our own code.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from nightmill.canonical import decode, encode
from nightmill.config import Settings
from nightmill.errors import ModelError
from nightmill_worker.model.config import ModelConfig

_EXIT_MODEL_ERROR = 3
_FILES = ("config.json", "generation_config.json")
_CODE = ("config.py", "families.py")


def read_config(directory: Path) -> ModelConfig:
    """The config of a model directory.

    Raises:
        ModelError: as `ModelConfig.from_directory`.
    """
    remembered = Settings.from_env(os.environ).cache / "configs" / f"{_key(directory)}.json"
    try:
        return decode(ModelConfig, remembered.read_text())
    except (OSError, ValueError):  # not there yet, or cut short by a full disk
        text = _read_apart(directory)
    _remember(remembered, text)
    return decode(ModelConfig, text)


def _key(directory: Path) -> str:
    digest = hashlib.blake2b(version("transformers").encode(), digest_size=16)
    for path in [directory / name for name in _FILES] + [Path(__file__).with_name(name) for name in _CODE]:
        digest.update(path.read_bytes() if path.is_file() else b"")
        digest.update(b"\0")
    return digest.hexdigest()


def _read_apart(directory: Path) -> str:
    command = [sys.executable, "-m", "nightmill_worker.model.config_reader", str(directory)]
    child = subprocess.run(
        command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, check=False
    )
    if child.returncode == _EXIT_MODEL_ERROR:
        told = json.loads(child.stdout.splitlines()[-1])
        raise ModelError(told["message"], hint=told["hint"])
    if child.returncode != 0:
        tail = "\n  ".join((child.stderr or child.stdout).strip().splitlines()[-4:])
        raise ModelError(f"{directory / 'config.json'} could not be read (exit code {child.returncode}):\n  {tail}")
    return child.stdout.splitlines()[-1]


def _remember(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(text)
        Path(file.name).replace(path)
    except OSError:
        # A cache that cannot be written costs the next start a few seconds, nothing else.
        return


def _main() -> int:
    try:
        text = encode(ModelConfig.from_directory(Path(sys.argv[1])))
    except ModelError as error:
        text = json.dumps({"message": error.message, "hint": error.hint})
        sys.stdout.write(f"\n{text}\n")
        return _EXIT_MODEL_ERROR
    sys.stdout.write(f"\n{text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(_main())
