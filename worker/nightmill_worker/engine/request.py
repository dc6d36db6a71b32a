"""What the engine is asked for, and what it gives back."""

from dataclasses import dataclass
from enum import StrEnum

from nightmill.sampling import SamplingParams
from nightmill.states import Tier


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    """EOS, a stop token or a stop string."""
    LENGTH = "length"
    """max_tokens, or the model's context, was reached."""
    ABORT = "abort"
    """Cancelled from outside; not an answer."""
    ERROR = "error"
    """The engine could not run this request; `error` says why. Not an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A tokenised row, valid for the model: 1 ≤ len(prompt), len(prompt) + max_tokens ≤ max_model_len."""

    request_id: int  # unique among live requests of one engine service
    job_id: str
    tier: Tier
    prompt: tuple[int, ...]  # token ids
    sampling: SamplingParams  # max_tokens is already clamped to the context
    seed: int  # unsigned 64 bit, from (job seed, source_file, row_index, sample index)
    eos_token_ids: tuple[int, ...] = ()  # empty with ignore_eos


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Logprobs of one generated position: the drawn token's, and the top-k's, natural log, after penalties."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A sequence that has ended: each request has exactly one."""

    request_id: int
    token_ids: tuple[int, ...]  # generated; includes the stop or EOS token that ended it
    finish_reason: FinishReason
    stop_match: str | int | None  # the stop string or stop/EOS token id that ended it
    num_prompt_tokens: int
    num_cached_tokens: int  # prompt tokens whose KV was taken from the prefix index at first admission
    num_preemptions: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None  # set with ERROR
