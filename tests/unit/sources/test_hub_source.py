"""The hub's client reads its environment once, at import: each case runs in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

_RESOLVE = """
import sys
from nightmill.errors import ModelError
from nightmill.records import ModelSpec
from nightmill_worker.model.source import resolve_model
try:
    print(resolve_model(ModelSpec(model=sys.argv[1], revision=sys.argv[2] or None)).directory)
except ModelError as error:
    print("ModelError", error)
"""
_COMMIT = "0123456789abcdef0123456789abcdef01234567"


def _resolve(home: Path, model: str, revision: str = "", **variables: str) -> str:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "NIGHTMILL_"))}
    environ |= {"HF_HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    done = subprocess.run(
        [sys.executable, "-c", _RESOLVE, model, revision], env=environ, capture_output=True, text=True, check=True
    )
    return done.stdout


def _fill_cache(home: Path) -> Path:
    repo = home / "hub" / "models--org--name"
    snapshot = repo / "snapshots" / _COMMIT
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(_COMMIT)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (snapshot / name).write_text("{}")
    return snapshot


def test_the_offline_cache_is_used(tmp_path: Path) -> None:
    snapshot = _fill_cache(tmp_path)
    assert _resolve(tmp_path, "org/name", HF_HUB_OFFLINE="1").strip() == str(snapshot)
    assert _resolve(tmp_path, "org/name", _COMMIT, HF_HUB_OFFLINE="1").strip() == str(snapshot)


def test_a_hub_that_does_not_answer_falls_back_to_the_cache(tmp_path: Path) -> None:
    snapshot = _fill_cache(tmp_path)
    assert _resolve(tmp_path, "org/name", HF_ENDPOINT="http://127.0.0.1:9").strip() == str(snapshot)


def test_offline_and_not_in_the_cache(tmp_path: Path) -> None:
    told = _resolve(tmp_path, "org/other", HF_HUB_OFFLINE="1")
    assert "ModelError org/other is not a folder here" in told
    assert "HF_HUB_OFFLINE is set" in told
    assert "hf download org/other" in told


def test_a_pinned_revision_that_the_cache_lacks(tmp_path: Path) -> None:
    _fill_cache(tmp_path)
    told = _resolve(tmp_path, "org/name", "f" * 40, HF_HUB_OFFLINE="1")
    assert f"org/name at revision {'f' * 40}" in told


def test_no_network_and_not_in_the_cache(tmp_path: Path) -> None:
    told = _resolve(tmp_path, "org/other", HF_ENDPOINT="http://127.0.0.1:9")
    assert "http://127.0.0.1:9 did not answer" in told
    assert "--model demo needs no hub" in told
