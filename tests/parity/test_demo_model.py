"""The real demo model through the real engine: 64 prompts, greedy, against transformers.

transformers is teacher-forced with what the engine generated: one forward gives its choice after every prefix, which
is its own greedy path up to the first divergence, and nothing after a first divergence is judged.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from nightmill.records import EngineOptions, ModelSpec
from nightmill.sampling import SamplingParams
from nightmill.states import Tier
from nightmill_worker.bench.comparator import Comparison, ReferenceStep, compare_greedy
from nightmill_worker.bench.corpus import corpus_texts
from nightmill_worker.engine.loop import EngineLoop
from nightmill_worker.engine.options import LoopOptions
from nightmill_worker.engine.request import Finished, Request
from nightmill_worker.feed.tokenizer import Tokenizer
from nightmill_worker.model.runner import ModelRunnerConfig

pytestmark = pytest.mark.demo_model

MAX_TOKENS = 8
MAX_MODEL_LEN = 256
LENGTHS = (1, 2, 3, 5, 8, 13, 15, 16, 17, 21, 31, 32, 33, 47, 64, 90)
SHARED = 35  # tokens that a quarter of the prompts begin with: two whole pages and a part


@pytest.fixture(scope="module")
def prompts(demo_model_dir: Path) -> list[tuple[int, ...]]:
    tokenizer = Tokenizer.load(demo_model_dir)
    texts = [tokenizer.encode(text[200:1600]) for text in corpus_texts()[:64]]
    cut = [tuple(ids[: LENGTHS[i % 16]]) for i, ids in enumerate(texts)]
    shared = tuple(texts[0][:SHARED])
    return [shared + ids if i % 4 == 3 else ids for i, ids in enumerate(cut)]


def generate(directory: Path, prompts: Sequence[tuple[int, ...]], options: LoopOptions, dtype: str) -> list[list[int]]:
    spec = ModelSpec(model=str(directory), dtype=dtype, max_model_len=MAX_MODEL_LEN)
    runner = ModelRunnerConfig(model_dir=directory, spec=spec, options=EngineOptions(pool_bytes=128 << 20)).build()
    loop = EngineLoop(runner, options)
    for i, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
        loop.add(Request(request_id=i, job_id="parity", tier=Tier.NORMAL, prompt=prompt, sampling=sampling, seed=i))
    ended: list[Finished] = []
    while loop.has_work:
        ended += loop.step()
    loop.close()
    assert not [f.error for f in ended if f.error is not None]
    return [list(f.token_ids) for f in sorted(ended, key=lambda f: f.request_id)]


def load_reference(directory: Path, dtype: torch.dtype) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager")
    return model.eval()


@torch.inference_mode()
def reference_steps(model: Any, prompt: Sequence[int], generated: Sequence[int]) -> list[ReferenceStep]:
    ids = torch.tensor([[*prompt, *generated[:-1]]])
    logits = model(ids, use_cache=False, logits_to_keep=len(generated)).logits[0].float()
    best = logits.topk(20)
    return [
        ReferenceStep(int(line.argmax()), dict(zip(tokens, values, strict=True)), float(line.abs().max()))
        for line, tokens, values in zip(logits, best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def compare(model: Any, prompts: Sequence[tuple[int, ...]], generated: list[list[int]], dtype: str) -> Comparison:
    reference = [reference_steps(model, p, g) for p, g in zip(prompts, generated, strict=True)]
    return compare_greedy(reference, generated, dtype=dtype)


CRAMPED = LoopOptions(max_num_seqs=16, max_num_batched_tokens=48, max_model_len=MAX_MODEL_LEN)
ROOMY = LoopOptions(
    max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=MAX_MODEL_LEN, enable_prefix_caching=False
)


def test_float32_equals_transformers_whatever_the_schedule(
    demo_model_dir: Path, prompts: list[tuple[int, ...]], record_property: Any
) -> None:
    cramped = generate(demo_model_dir, prompts, CRAMPED, "float32")
    comparison = compare(load_reference(demo_model_dir, torch.float32), prompts, cramped, "float32")
    record_property("near_ties", len(comparison.near_ties))
    assert not comparison.failures, str(comparison)
    assert not comparison.near_ties, str(comparison)
    assert generate(demo_model_dir, prompts, ROOMY, "float32") == cramped


def test_bfloat16_differs_from_transformers_only_at_near_ties(
    demo_model_dir: Path, prompts: list[tuple[int, ...]], record_property: Any
) -> None:
    generated = generate(demo_model_dir, prompts, CRAMPED, "bfloat16")
    comparison = compare(load_reference(demo_model_dir, torch.bfloat16), prompts, generated, "bfloat16")
    record_property("near_ties", len(comparison.near_ties))
    assert not comparison.failures, str(comparison)
    # Correct engines agree on most short answers: many near ties would mean a loss of precision.
    assert comparison.num_identical > len(prompts) // 2, str(comparison)
