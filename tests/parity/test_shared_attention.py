"""Answers with shared-prefix attention and without are the same, greedy and drawn; the C library changes not a bit."""

from pathlib import Path

import pytest
from tests.parity.tiny_models import save_tiny

from nightmill.records import EngineOptions, ModelSpec
from nightmill.sampling import SamplingParams
from nightmill.states import Tier
from nightmill_kernels.backend import active_isa
from nightmill_kernels.cpu.isa import REFERENCE
from nightmill_worker.bench.corpus import corpus_texts
from nightmill_worker.engine.loop import EngineLoop
from nightmill_worker.engine.options import LoopOptions
from nightmill_worker.engine.request import Finished, Request
from nightmill_worker.feed.tokenizer import Tokenizer
from nightmill_worker.model.runner import ModelRunnerConfig

Prompts = list[tuple[int, ...]]
MAX_MODEL_LEN = 256


def grouped_prompts(vocab_size: int) -> Prompts:
    """Two prefixes of 140 and 170 tokens with six rows each, and four rows without; mixed."""
    stems = [tuple((i * 37 + n) % vocab_size for i in range(length)) for n, length in ((1, 140), (2, 170), (3, 0))]
    sizes = (0, 1, 0, 1, 2, 0, 1, 0, 1, 2, 0, 1, 2, 0, 1, 2)
    return [
        stems[stem] + tuple((r * 11 + j * j + 5) % vocab_size for j in range(1 + r)) for r, stem in enumerate(sizes)
    ]


def answers(directory: Path, prompts: Prompts, dtype: str, temperature: float, *, shared: bool) -> list[list[int]]:
    spec = ModelSpec(model=str(directory), dtype=dtype, max_model_len=MAX_MODEL_LEN)
    options = EngineOptions(pool_bytes=128 << 20, num_threads=1)
    runner = ModelRunnerConfig(model_dir=directory, spec=spec, options=options).build()
    # Chunks beside the grouped decodes: the budget does not hold all prompts.
    limits = LoopOptions(
        max_num_seqs=16, max_num_batched_tokens=128, max_model_len=MAX_MODEL_LEN, enable_shared_attention=shared
    )
    loop = EngineLoop(runner, limits)
    sampling = SamplingParams(max_tokens=24, temperature=temperature, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        loop.add(Request(request_id=i, job_id="parity", tier=Tier.NORMAL, prompt=prompt, sampling=sampling, seed=i))
    ended: list[Finished] = []
    while loop.has_work:
        ended += loop.step()
    rows = loop.stats().shared_attention_rows
    loop.close()
    assert (rows > 100) == shared, f"{rows} rows were in a group"
    assert not [f.error for f in ended if f.error is not None]
    return [list(f.token_ids) for f in sorted(ended, key=lambda f: f.request_id)]


# llama's heads of 8 take the torch reference, the others' of 16 the C library; gemma2 has windows and a soft cap.
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma2"])
@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "drawn"])
def test_tiny_models_answer_the_same(tmp_path: Path, family: str, temperature: float) -> None:
    save_tiny(family, tmp_path)
    prompts = grouped_prompts(131)
    alone = answers(tmp_path, prompts, "float32", temperature, shared=False)
    assert len({tuple(row) for row in alone}) > 4
    assert answers(tmp_path, prompts, "float32", temperature, shared=True) == alone


@pytest.mark.demo_model
@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "drawn"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_demo_model_answers_the_same(demo_model_dir: Path, dtype: str, temperature: float) -> None:
    if dtype == "bfloat16" and active_isa() == REFERENCE:
        pytest.skip("only the C library promises the same bits")
    tokenizer = Tokenizer.load(demo_model_dir)
    texts = [tuple(tokenizer.encode(text[:1500])) for text in corpus_texts()[64:74]]
    prompts = [texts[r % 2][:150] + texts[r][20 : 24 + r] for r in range(10)]
    alone = answers(demo_model_dir, prompts, dtype, temperature, shared=False)
    assert answers(demo_model_dir, prompts, dtype, temperature, shared=True) == alone
