"""Engine, models and kernels work on a machine that has torch and triton, but no queue, database or object store."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("bare_engine.py")
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "vocab_size": 61,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("tiny")
    (directory / "config.json").write_text(json.dumps(TINY))
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(PROGRAM), str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_every_module_imports(found: dict[str, Any]) -> None:
    assert found["failed"] == {}
    assert found["modules"] > 80


def test_a_tiny_model_runs(found: dict[str, Any]) -> None:
    assert [len(tokens) for tokens in found["answers"]] == [5, 5]
    assert all(0 <= token < TINY["vocab_size"] for tokens in found["answers"] for token in tokens)
