import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from nightmill.config import Settings
from nightmill.errors import ModelError
from nightmill.records import ModelSpec
from nightmill_worker.model.source import directory_digest, resolve_model

MakeModel = Callable[..., Path]


def test_a_local_directory(make_model: MakeModel, settings: Settings) -> None:
    directory = make_model("my-model")
    resolved = resolve_model(ModelSpec(model=str(directory)), settings=settings)
    assert resolved.directory == directory
    assert resolved.name == "my-model"
    assert resolved.has_weights


def test_dummy_needs_no_weights(make_model: MakeModel, settings: Settings) -> None:
    directory = make_model(model__safetensors=None)
    resolved = resolve_model(ModelSpec(model=str(directory), load_format="dummy"), settings=settings)
    assert not resolved.has_weights
    with pytest.raises(ModelError, match=r"no \*\.safetensors"):
        resolve_model(ModelSpec(model=str(directory)), settings=settings)


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"config__json": None}, "no config.json"),
        ({"tokenizer__json": None}, "no tokenizer.json"),
        ({"model__safetensors": None, "pytorch_model__bin": b""}, "pytorch_model.bin: only safetensors"),
        ({"config__json": None, "model__gguf": b""}, "model.gguf"),
    ],
)
def test_an_incomplete_directory_says_what_is_missing(
    make_model: MakeModel, settings: Settings, files: dict[str, bytes | None], told: str
) -> None:
    with pytest.raises(ModelError, match=told):
        resolve_model(ModelSpec(model=str(make_model(**files))), settings=settings)


@pytest.mark.parametrize("model", ["/nowhere/model", "./nowhere", "nowhere/model.gguf", "a/b/c", "~nobody/x y"])
def test_a_path_that_is_not_there_is_never_looked_for_on_the_hub(settings: Settings, model: str) -> None:
    with pytest.raises(ModelError, match=r"there is no model at .*\n.*demo"):
        resolve_model(ModelSpec(model=model), settings=settings)


def test_a_file_of_another_kind(tmp_path: Path, settings: Settings) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(b"")
    with pytest.raises(ModelError, match=r"not a \.gguf file"):
        resolve_model(ModelSpec(model=str(file)), settings=settings)


@pytest.mark.parametrize("model", ["demo", "s3://bucket/prefix"])
def test_a_revision_is_for_hub_models_only(settings: Settings, model: str) -> None:
    with pytest.raises(ModelError, match="--revision"):
        resolve_model(ModelSpec(model=model, revision="main"), settings=settings)


def test_the_digest_follows_content_not_place(make_model: MakeModel, tmp_path: Path) -> None:
    directory = make_model()
    copy = tmp_path / "elsewhere"
    shutil.copytree(directory, copy)
    (copy / ".cache").mkdir()
    (copy / "notes.md").write_text("not part of the model")
    before = directory_digest(directory)
    assert directory_digest(copy) == before
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        content = bytearray((copy / name).read_bytes())
        content[-1] ^= 1
        (copy / name).write_bytes(content)
        assert directory_digest(copy) != before
        shutil.copy(directory / name, copy / name)
