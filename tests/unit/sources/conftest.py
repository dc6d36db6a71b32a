"""Model directories and settings for the tests of model sources."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from nightmill.config import Settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return replace(Settings.from_env({"HOME": str(tmp_path)}), cache=tmp_path / "cache")


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., Path]:
    """Write a directory that looks like a model; contents by file name overrule or, with None, remove."""

    def make(name: str = "tiny", **files: bytes | None) -> Path:
        contents: dict[str, bytes | None] = {
            "config.json": json.dumps({"model_type": "llama"}).encode(),
            "tokenizer.json": b"{}",
            "model.safetensors": b"\x02\0\0\0\0\0\0\0{}",
        }
        contents |= {name.replace("__", "."): content for name, content in files.items()}
        directory = tmp_path / "models" / name
        directory.mkdir(parents=True)
        for file_name, content in contents.items():
            if content is not None:
                (directory / file_name).write_bytes(content)
        return directory

    return make
