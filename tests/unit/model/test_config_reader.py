"""Reading a config without loading transformers into this process."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.parity.tiny_models import TINY, save_tiny

from nightmill.errors import ModelError
from nightmill_worker.model.config import ModelConfig
from nightmill_worker.model.config_reader import read_config


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIGHTMILL_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3"])
def test_it_is_what_transformers_says_both_times(name: str, tmp_path: Path) -> None:
    assert name in TINY
    save_tiny(name, tmp_path / "model")
    expected = ModelConfig.from_directory(tmp_path / "model")
    assert read_config(tmp_path / "model") == expected
    (remembered,) = (tmp_path / "cache" / "configs").iterdir()
    changed = remembered.read_text().replace(f'"vocab_size":{expected.vocab_size}', '"vocab_size":7')
    remembered.write_text(changed)
    assert read_config(tmp_path / "model").vocab_size == 7  # it was really read from there
    remembered.write_text(changed[:40])
    assert read_config(tmp_path / "model") == expected


def test_a_changed_model_is_read_again(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    before = read_config(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 0.5'))
    assert before.norm_eps != read_config(tmp_path).norm_eps == 0.5


def test_errors_arrive_with_their_hint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba", "architectures": ["MambaForCausalLM"]}')
    with pytest.raises(ModelError) as apart:
        read_config(tmp_path)
    with pytest.raises(ModelError) as here:
        ModelConfig.from_directory(tmp_path)
    assert str(apart.value) == str(here.value)


def test_the_engine_process_loads_a_model_without_transformers(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    code = (
        "import sys; from pathlib import Path; from nightmill.records import EngineOptions, ModelSpec\n"
        "from nightmill_worker.model_recipe import ModelRecipe\n"
        "if __name__ == '__main__':\n"
        f"    d = Path({str(tmp_path)!r})\n"
        "    ModelRecipe(directory=d, spec=ModelSpec(model='m'), options=EngineOptions(pool_bytes=4 << 20)).build()\n"
        "    sys.exit('transformers' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
