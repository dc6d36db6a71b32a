"""How the loop schedules: limits and policy, fixed for an engine's life."""

from dataclasses import dataclass
from enum import StrEnum

from nightmill.errors import ConfigError


class Policy(StrEnum):
    """When sequences may join and leave the batch."""

    CONTINUOUS = "continuous"
    """Re-decided after every step: the finished leave at once, the waiting take their place."""
    STATIC = "static"
    """Groups of max_num_seqs in arrival order; a finished row stays, padded, until its group ends. For comparison."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """Limits of one engine loop.

    Raises:
        ConfigError: a limit is below 1, or one step could not hold a decode of every running sequence.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048  # tokens in one step
    enable_prefix_caching: bool = True
    max_model_len: int = 4096  # prompt + generated tokens of one sequence
    policy: Policy = Policy.CONTINUOUS
    max_prefill_chunk: int | None = None  # tokens of one sequence in one step; None: the step's budget

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "policy", Policy(self.policy))
        except ValueError as error:
            raise ConfigError(f"policy must be one of {', '.join(Policy)}, not {self.policy!r}") from error
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_prefill_chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            # Every running sequence decodes in every step; with less there would be rows that never advance.
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs})"
            )
