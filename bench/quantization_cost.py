"""What int8 weights cost in accuracy: loss on real text, and how often greedy answers are the same.

    python -m bench.quantization_cost [--model demo] [--tokens 40000] [--out bench/quantization_cost.json]

Four ways to run one model: float32 (the yardstick), bfloat16, `--quantization int8`, and int8 with the output
projection quantised, too. Texts: Debian's package descriptions, and the documentation that `nightmill bench` uses, in
windows of 512 tokens. Losses are compared token by token; the error given is that of the mean over rows. The answers
are those of `make demo`: 64 prompts, 48 tokens, greedy.
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch

from bench.scoring import Scores, score
from nightmill.records import EngineOptions, ModelSpec
from nightmill.sampling import SamplingParams
from nightmill.states import Tier
from nightmill_worker.bench.corpus import corpus_texts
from nightmill_worker.bench.machine import this_machine
from nightmill_worker.engine.loop import EngineLoop
from nightmill_worker.engine.options import LoopOptions
from nightmill_worker.engine.request import Request
from nightmill_worker.feed.chat import PromptRenderer
from nightmill_worker.feed.tokenizer import Tokenizer
from nightmill_worker.model.config_reader import read_config
from nightmill_worker.model.linear_int8 import Int8Linear
from nightmill_worker.model.runner import ModelRunner, ModelRunnerConfig
from nightmill_worker.model.source import resolve_model
from nightmill_worker.model.weights import load_weights

WINDOW = 512
HERE = Path(__file__).parent
SYSTEM_PROMPT = "Summarise this software package in one short sentence."  # of `make demo`
MAX_TOKENS = 48
WAYS = {"float32": ("float32", None), "bfloat16": ("bfloat16", None), "int8": ("bfloat16", "int8")}
INT8_HEAD = "int8, output projection too"


@dataclass(frozen=True, slots=True)
class Loss:
    """Of one way to run the model on one text."""

    perplexity: float
    more_than_bfloat16: float  # nats a token
    error: float  # of that, one standard error
    same_best_as_float32: float  # share of tokens
    tokens: int


@dataclass(frozen=True, slots=True)
class Agreement:
    """Greedy answers of one way against another's."""

    rows_identical: int
    rows: int
    tokens_before_divergence: float  # share


def build(directory: Path, way: str) -> ModelRunner:
    dtype, quantization = WAYS[way] if way in WAYS else WAYS["int8"]
    spec = ModelSpec(model=str(directory), dtype=dtype, quantization=quantization, max_model_len=WINDOW)
    runner = ModelRunnerConfig(
        model_dir=directory, spec=spec, options=EngineOptions(device="cpu", pool_bytes=256 << 20)
    ).build()
    assert isinstance(runner, ModelRunner)
    if way == INT8_HEAD:
        # Not a choice that users have: measured to see what the head's 28 M weights would cost.
        weights = load_weights(directory, read_config(directory), torch.bfloat16)
        runner._loaded()._lm_head = Int8Linear(weights.lm_head)  # type: ignore[assignment]
    return runner


def texts(tokenizer: Tokenizer, num_tokens: int) -> dict[str, list[list[int]]]:
    """Rows of tokens of each text, some `num_tokens` in all, from all over it."""
    packages = pq.read_table(HERE.parent / "tests/data/debian_packages_2k.parquet")["description"].to_pylist()
    documents = [tokenizer.encode(text) for text in corpus_texts()]
    windows = [ids[at : at + WINDOW] for ids in documents for at in range(0, len(ids), WINDOW)]
    return {
        "package descriptions": _spread([tokenizer.encode(text)[:WINDOW] for text in packages], num_tokens),
        "documentation": _spread(windows, num_tokens),
    }


def _spread(rows: list[list[int]], num_tokens: int) -> list[list[int]]:
    rows = [row for row in rows if len(row) >= 2]
    stride = max(1, round(sum(map(len, rows)) / num_tokens))
    return rows[::stride]


def demo_prompts(tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    renderer = PromptRenderer(tokenizer, system_prompt=SYSTEM_PROMPT)
    texts = pq.read_table(HERE.parent / "examples/packages.parquet")["description"].to_pylist()
    rendered = [renderer.render(text, None) for text in texts]
    return [tuple(tokenizer.encode(r.text, r.add_special_tokens)) for r in rendered]


def answers(runner: ModelRunner, prompts: Sequence[tuple[int, ...]]) -> list[list[int]]:
    loop = EngineLoop(runner, LoopOptions(max_num_seqs=64, max_num_batched_tokens=512, max_model_len=WINDOW))
    sampling = SamplingParams(max_tokens=MAX_TOKENS)
    for i, prompt in enumerate(prompts):
        loop.add(Request(request_id=i, job_id="demo", tier=Tier.NORMAL, prompt=prompt, sampling=sampling, seed=i))
    found: dict[int, list[int]] = {}
    while loop.has_work:
        found |= {f.request_id: list(f.token_ids) for f in loop.step()}
    return [found[i] for i in range(len(prompts))]


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> Agreement:
    same = [
        next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        for a, b in zip(ours, theirs, strict=True)
    ]
    total = sum(max(len(a), len(b)) for a, b in zip(ours, theirs, strict=True))
    return Agreement(sum(a == b for a, b in zip(ours, theirs, strict=True)), len(ours), sum(same) / total)


def loss(ours: list[Scores], bfloat16: list[Scores], float32: list[Scores]) -> Loss:
    tokens = sum(len(row.loss) for row in ours)
    more = np.array([(a.loss - b.loss).sum() for a, b in zip(ours, bfloat16, strict=True)])
    counts = np.array([len(row.loss) for row in ours])
    mean = more.sum() / tokens
    # Of a ratio of sums over rows: tokens of a row are not independent of each other.
    error = math.sqrt(((more - mean * counts) ** 2).sum()) / tokens
    same = sum(int((a.best == b.best).sum()) for a, b in zip(ours, float32, strict=True))
    return Loss(math.exp(sum(row.loss.sum() for row in ours) / tokens), mean, error, same / tokens, tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, default=40_000, help="of each text")
    parser.add_argument("--out", type=Path, help="write everything as JSON here")
    options = parser.parse_args()
    directory = resolve_model(ModelSpec(model=options.model)).directory
    tokenizer = Tokenizer.load(directory)
    rows, prompts = texts(tokenizer, options.tokens), demo_prompts(tokenizer)
    scores: dict[str, dict[str, list[Scores]]] = {}
    said: dict[str, list[list[int]]] = {}
    for way in (*WAYS, INT8_HEAD):
        print(f"running {way}", flush=True)
        runner = build(directory, way)
        with torch.inference_mode():
            scores[way] = {name: score(runner, of) for name, of in rows.items()}
        said[way] = answers(runner, prompts)
        runner.close()
    losses = {
        name: {way: loss(scores[way][name], scores["bfloat16"][name], scores["float32"][name]) for way in scores}
        for name in rows
    }
    agreements = {way: agreement(said[way], said["bfloat16"]) for way in said}
    for name, of in losses.items():
        print(f"\n{name}, {of['int8'].tokens:,} tokens\n{'':30}perplexity   nats more than bfloat16   best as float32")
        for way, line in of.items():
            print(
                f"{way:30}{line.perplexity:10.3f}   {line.more_than_bfloat16:+10.5f} ± {line.error:.5f}"
                f"   {line.same_best_as_float32:10.1%}"
            )
    print(f"\n{len(prompts)} greedy answers against bfloat16's")
    for way, line in agreements.items():
        print(
            f"{way:30}{line.rows_identical} identical, "
            f"{line.tokens_before_divergence:.1%} of tokens before the first difference"
        )
    if options.out is not None:
        report = {
            "machine": asdict(this_machine()),
            "model": options.model,
            "losses": {name: {way: asdict(line) for way, line in of.items()} for name, of in losses.items()},
            "answers": {way: asdict(line) for way, line in agreements.items()},
        }
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
