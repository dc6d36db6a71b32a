"""The demo model through the engine, and transformers asked for its logits along an answer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from tests.parity.engine_runs import POLICIES, Answers, answer, requests_of

from nightmill.records import EngineOptions, ModelSpec
from nightmill.sampling import SamplingParams
from nightmill_worker.bench.comparator import ReferenceStep
from nightmill_worker.engine.options import LoopOptions
from nightmill_worker.engine.request import Request
from nightmill_worker.model.runner import ModelRunner, ModelRunnerConfig

MAX_MODEL_LEN = 256
CANDIDATES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What must not change an answer."""

    page_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_prefill_chunk: int | None = None
    enable_prefix_caching: bool = True
    enable_shared_attention: bool = True
    policies: str = "arrival"  # of engine_runs.POLICIES
    pool_bytes: int = 128 << 20

    @property
    def options(self) -> LoopOptions:
        """For the engine's loop."""
        return replace(
            POLICIES[self.policies],
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_prefill_chunk=self.max_prefill_chunk,
            enable_prefix_caching=self.enable_prefix_caching,
            enable_shared_attention=self.enable_shared_attention,
            max_model_len=MAX_MODEL_LEN,
        )


def build_runner(directory: Path, schedule: Schedule, dtype: str) -> ModelRunner:
    """A runner with a small pool."""
    spec = ModelSpec(model=str(directory), dtype=dtype, max_model_len=MAX_MODEL_LEN)
    options = EngineOptions(pool_bytes=schedule.pool_bytes, page_size=schedule.page_size)
    return ModelRunnerConfig(model_dir=directory, spec=spec, options=options).build()


def generate(
    directory: Path, prompts: Sequence[tuple[int, ...]], schedule: Schedule, dtype: str, max_tokens: int = 8
) -> list[list[int]]:
    """Greedy tokens of each prompt, EOS ignored."""
    requests = requests_of(prompts, [SamplingParams()], max_tokens=max_tokens)
    return answer(build_runner(directory, schedule, dtype), requests, schedule.options).tokens


@lru_cache(maxsize=1)  # a runner in float32 takes most of a GB
def shared_runner(directory: Path, page_size: int, pool_bytes: int, dtype: str) -> ModelRunner:
    """As `build_runner`, kept for the next test that wants one like it."""
    return build_runner(directory, Schedule(page_size=page_size, pool_bytes=pool_bytes), dtype)


def answers_of(directory: Path, requests: Sequence[Request], schedule: Schedule, dtype: str) -> Answers:
    """Answers to any requests, on a runner that may have served others before."""
    runner = shared_runner(directory, schedule.page_size, schedule.pool_bytes, dtype)
    return answer(runner, requests, schedule.options)


def load_reference(directory: Path, dtype: torch.dtype) -> Any:
    """transformers' own model, eager attention."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager")
    return model.eval()


@torch.inference_mode()
def reference_logits(model: Any, prompt: Sequence[int], generated: Sequence[int]) -> torch.Tensor:
    """float32 [len(generated), V]: the reference's logits after every proper prefix of `generated`."""
    ids = torch.tensor([[*prompt, *generated[:-1]]])
    logits: torch.Tensor = model(ids, use_cache=False, logits_to_keep=len(generated)).logits[0].float()
    return logits


def reference_steps(
    model: Any, prompt: Sequence[int], generated: Sequence[int], *, follow: bool = False
) -> list[ReferenceStep]:
    """The reference's logits after every prefix of `generated`, teacher-forced.

    With `follow` the step's token is the generated one (to judge a third answer against it), else the reference's own.
    """
    logits = reference_logits(model, prompt, generated)
    best = logits.topk(CANDIDATES)
    steps = []
    for line, token, ids_, values in zip(logits, generated, best.indices.tolist(), best.values.tolist(), strict=True):
        candidates = dict(zip(ids_, values, strict=True))
        drawn = token if follow else int(line.argmax())
        candidates.setdefault(drawn, float(line[drawn]))
        steps.append(ReferenceStep(drawn, candidates, float(line.abs().max())))
    return steps
