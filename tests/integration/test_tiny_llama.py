"""The real decoder behind `nightmill run`: a Llama with random weights, small enough for any machine."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tests.integration.conftest import Bench
from tests.integration.fake_model import VOCAB, make_tokenizer

from nightmill.errors import SpecMismatchError
from nightmill.records import EngineOptions, JobOptions, JobSpec, ModelSpec
from nightmill.sampling import SamplingParams
from nightmill_worker.drain import Drain
from nightmill_worker.embedded import EmbeddedRun, RunOptions
from nightmill_worker.loaded_model import load_model
from nightmill_worker.report import SilentReporter

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": None,
}
ROWS = 40


@pytest.fixture(scope="module")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_tokenizer(tmp_path_factory.mktemp("llama"))
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


def run(
    bench: Bench,
    llama_dir: Path,
    name: str,
    engine: EngineOptions,
    sampling: SamplingParams,
    quantization: str | None = None,
) -> list[dict[str, Any]]:
    model = ModelSpec(model=str(llama_dir), load_format="dummy", dtype="float32", quantization=quantization)
    spec = JobSpec(inputs=(str(bench.input),), output=str(bench.path / name), model=model, sampling=sampling)
    loaded = load_model(model, engine, progress=lambda _: None)
    run_options = RunOptions(engine=engine, in_process=True)
    embedded = EmbeddedRun(loaded, run_options, bench.settings, SilentReporter(), Drain())
    embedded.run(spec, JobOptions(shard_rows=25))
    return bench.rows(bench.path / name)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_do_not_depend_on_how_they_are_run(bench: Bench, llama_dir: Path, temperature: float) -> None:
    bench.write([" ".join(str((i * 7 + j) % 900) for j in range(1 + i % 40)) for i in range(ROWS)], row_group_size=25)
    sampling = SamplingParams(max_tokens=12, temperature=temperature)
    small = {"pool_bytes": 4 << 20, "num_threads": 1}
    base = run(bench, llama_dir, "base", EngineOptions(max_num_seqs=8, **small), sampling)
    assert len({row["completion"] for row in base}) > ROWS // 2
    assert all(row["completion_tokens"] == 12 for row in base)
    others = {
        "alone": EngineOptions(max_num_seqs=1, **small),
        "pages": EngineOptions(max_num_seqs=8, page_size=32, enable_prefix_caching=False, **small),
        "chunks": EngineOptions(max_num_seqs=8, max_num_batched_tokens=16, **small),
    }
    for name, engine in others.items():
        rows = run(bench, llama_dir, name, engine, sampling)
        assert [row["completion"] for row in rows] == [row["completion"] for row in base], name


def test_int8_answers_are_those_of_another_job(bench: Bench, llama_dir: Path) -> None:
    bench.write(6)
    engine, sampling = EngineOptions(pool_bytes=4 << 20, num_threads=1), SamplingParams(max_tokens=12, logprobs=1)
    plain = run(bench, llama_dir, "plain", engine, sampling)
    quantized = run(bench, llama_dir, "int8", engine, sampling, "int8")
    assert all(row["logprobs"] != other["logprobs"] for row, other in zip(quantized, plain, strict=True))
    assert all(row["completion_tokens"] == 12 for row in quantized)
    for name, other, line in (("plain", "int8", 'not set → "int8"'), ("int8", None, '"int8" → not set')):
        with pytest.raises(SpecMismatchError, match=f"quantization: {line}"):
            run(bench, llama_dir, name, engine, sampling, other)


def test_the_command_line_from_end_to_end(bench: Bench, llama_dir: Path) -> None:
    bench.write(10)
    output = bench.path / "cli"
    flags = [
        "--load-format",
        "dummy",
        "--dtype",
        "float32",
        "--max-tokens",
        "5",
        "--kv-cache-memory-bytes",
        "4M",
        "--json",
    ]
    program = str(Path(sys.executable).with_name("nightmill"))
    ended = subprocess.run(
        [program, "run", str(bench.input), "-o", str(output), "--model", str(llama_dir), *flags],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "NIGHTMILL_HOME": str(bench.path / "home")},
    )
    assert ended.returncode == 0, ended.stderr
    summary = json.loads(ended.stdout)
    assert set(summary) == {
        *("job", "rows", "rows_ok", "rows_failed", "rows_resumed", "rows_recomputed", "prompt_tokens"),
        *(
            "completion_tokens",
            "cached_tokens",
            "steps",
            "mean_batch",
            "preemptions",
            "engine_deaths",
            "roofline_share",
            "seconds",
            "output",
        ),
    }
    assert (summary["rows"], summary["rows_ok"], summary["completion_tokens"]) == (10, 10, 50)
    assert "bytes of KV per token" in ended.stderr
    assert f"{2 * 2 * 2 * 8 * 4} bytes of KV per token" in ended.stderr  # 2 · layers · kv_heads · head_dim · 4
    assert pq.read_table(output).num_rows == 10


def test_a_pool_too_small_for_the_model_says_so(bench: Bench, llama_dir: Path) -> None:
    bench.write(10)
    with pytest.raises(Exception, match="KV pool") as caught:
        run(bench, llama_dir, "small", EngineOptions(pool_bytes=1 << 10), SamplingParams(max_tokens=4))
    assert getattr(caught.value, "hint", None)


def test_the_feeder_never_imports_torch(bench: Bench, llama_dir: Path) -> None:
    code = """
import sys
import nightmill_worker.cli.run, nightmill_worker.embedded, nightmill_worker.loaded_model
from nightmill.records import EngineOptions, ModelSpec
model = ModelSpec(model=sys.argv[1], load_format="dummy")
nightmill_worker.loaded_model.load_model(model, EngineOptions(), progress=lambda _: None)
heavy = {"torch", "transformers", "safetensors"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else 0)
"""
    ended = subprocess.run([sys.executable, "-c", code, str(llama_dir)], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
