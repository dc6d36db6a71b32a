"""The demo model through the engine, and transformers asked for its logits along an answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from nightmill.records import EngineOptions, ModelSpec
from nightmill.sampling import SamplingParams
from nightmill.states import Tier
from nightmill_worker.bench.comparator import ReferenceStep
from nightmill_worker.engine.loop import EngineLoop
from nightmill_worker.engine.options import LoopOptions
from nightmill_worker.engine.request import Finished, Request
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


def build_runner(directory: Path, schedule: Schedule, dtype: str) -> ModelRunner:
    """A runner with a small pool."""
    spec = ModelSpec(model=str(directory), dtype=dtype, max_model_len=MAX_MODEL_LEN)
    options = EngineOptions(pool_bytes=128 << 20, page_size=schedule.page_size)
    return ModelRunnerConfig(model_dir=directory, spec=spec, options=options).build()


def generate(
    directory: Path, prompts: Sequence[tuple[int, ...]], schedule: Schedule, dtype: str, max_tokens: int = 8
) -> list[list[int]]:
    """Greedy tokens of each prompt, EOS ignored."""
    loop = EngineLoop(
        build_runner(directory, schedule, dtype),
        LoopOptions(
            max_num_seqs=schedule.max_num_seqs,
            max_num_batched_tokens=schedule.max_num_batched_tokens,
            max_prefill_chunk=schedule.max_prefill_chunk,
            enable_prefix_caching=schedule.enable_prefix_caching,
            max_model_len=MAX_MODEL_LEN,
        ),
    )
    for i, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        loop.add(Request(request_id=i, job_id="parity", tier=Tier.NORMAL, prompt=prompt, sampling=sampling, seed=i))
    ended: list[Finished] = []
    while loop.has_work:
        ended += loop.step()
    loop.close()
    assert not [f.error for f in ended if f.error is not None]
    return [list(f.token_ids) for f in sorted(ended, key=lambda f: f.request_id)]


def load_reference(directory: Path, dtype: torch.dtype) -> Any:
    """transformers' own model, eager attention."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager")
    return model.eval()


@torch.inference_mode()
def reference_steps(
    model: Any, prompt: Sequence[int], generated: Sequence[int], *, follow: bool = False
) -> list[ReferenceStep]:
    """The reference's logits after every prefix of `generated`, teacher-forced.

    With `follow` the step's token is the generated one (to judge a third answer against it), else the reference's own.
    """
    ids = torch.tensor([[*prompt, *generated[:-1]]])
    logits = model(ids, use_cache=False, logits_to_keep=len(generated)).logits[0].float()
    best = logits.topk(CANDIDATES)
    steps = []
    for line, token, ids_, values in zip(logits, generated, best.indices.tolist(), best.values.tolist(), strict=True):
        candidates = dict(zip(ids_, values, strict=True))
        drawn = token if follow else int(line.argmax())
        candidates.setdefault(drawn, float(line[drawn]))
        steps.append(ReferenceStep(drawn, candidates, float(line.abs().max())))
    return steps
