"""`nightmill bench --quantization int8` says what it measured wherever it says how fast."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.integration.fake_model import VOCAB, make_tokenizer
from tests.unit.model.test_model_config import SMOLLM2

from nightmill_worker.bench.session import BenchOptions, BenchSession
from nightmill_worker.model.config import ModelConfig
from nightmill_worker.model.dummy import dummy_weights
from nightmill_worker.model.weights import named_destinations

SMALL = SMOLLM2 | {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": VOCAB}
SMALL |= {"num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": False}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = make_tokenizer(tmp_path)
    (directory / "config.json").write_text(json.dumps(SMALL))
    config = ModelConfig.from_directory(directory)
    save_file(
        {
            name: place.contiguous()
            for name, place in named_destinations(config, dummy_weights(config, torch.float32)).items()
        },
        directory / "model.safetensors",
    )
    return directory


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_the_header_the_table_and_the_file_say_so(model: Path, quantization: str | None) -> None:
    said: list[str] = []
    session = BenchSession(
        BenchOptions(
            workloads=("W1",),
            policies=("continuous", "static"),
            baselines=(),
            rounds=1,
            model=str(model),
            dtype="float32",
            max_num_seqs=4,
            static_batch=4,
            max_num_batched_tokens=64,
            page_size=16,
            threads=1,
            limit=2,
            quantization=quantization,
        ),
        said.append,
    )
    cells = session.run(lambda *_: lambda _: None)
    names = ["continuous", "static"] if quantization is None else ["int8", "int8 static"]
    assert [cell.engine for cell in cells] == names
    assert any("NOT bf16" in line for line in said) == (quantization is not None)
    assert json.loads(session.json(cells))["settings"]["quantization"] == quantization
