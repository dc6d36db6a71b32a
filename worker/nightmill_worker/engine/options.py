"""How the loop schedules: limits and policy, fixed for an engine's life."""

from dataclasses import dataclass
from enum import StrEnum

from nightmill.errors import ConfigError
from nightmill.tier_weights import DEFAULT_WEIGHTS, TierWeights
from nightmill_worker.engine.fairness import DEFAULT_WINDOW_TOKENS


class Policy(StrEnum):
    """When sequences may join and leave the batch."""

    CONTINUOUS = "continuous"
    """Re-decided after every step: the finished leave at once, the waiting take their place."""
    STATIC = "static"
    """Groups of max_num_seqs in arrival order; a finished row stays, padded, until its group ends. For comparison."""


class QueueOrder(StrEnum):
    """In which order waiting requests of a tier are admitted."""

    PLANNED = "planned"
    """Prefix groups together, compute-heavy and memory-heavy in turn, longest first at the end; jobs share evenly."""
    ARRIVAL = "arrival"
    """First come, first served."""


class AdmissionRule(StrEnum):
    """When the page pool has room for another sequence."""

    GROWTH = "growth"
    """As long as what runs is predicted to fit until it ends."""
    RESERVE = "reserve"
    """When every sequence could reach max_tokens: never preempts, leaves much of the pool empty."""
    GREEDY = "greedy"
    """When its tokens fit now: fills the pool, and preempts when answers grow."""


class EvictionRule(StrEnum):
    """Which cached page goes first."""

    FUTURE = "future"
    """One that no waiting request has in its prefix, the least recently used among them."""
    LRU = "lru"
    """The least recently used."""


class PreemptionMode(StrEnum):
    """What becomes of the KV of a preempted sequence."""

    AUTO = "auto"
    """Whichever costs less, by measured rates."""
    SWAP = "swap"
    """Copied to the host, as long as there is room; else computed again."""
    RECOMPUTE = "recompute"
    """Dropped, and computed again, except for what the prefix index still has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """Limits of one engine loop.

    Raises:
        ConfigError: a limit is below 1, or one step could not hold a decode of every running sequence.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048  # tokens in one step
    enable_prefix_caching: bool = True
    enable_shared_attention: bool = True  # attention over pages that decodes share, once for all of them
    max_model_len: int = 4096  # prompt + generated tokens of one sequence
    policy: Policy = Policy.CONTINUOUS
    async_scheduling: bool = False  # submit a step while the one before runs, where the runner can; never when static
    max_prefill_chunk: int | None = None  # tokens of one sequence in one step; None: the step's budget
    # The static policy keeps to arrival order, and to room for every row of a group, whatever these say.
    order: QueueOrder = QueueOrder.PLANNED
    admission: AdmissionRule = AdmissionRule.GROWTH
    eviction: EvictionRule = EvictionRule.FUTURE
    preemption: PreemptionMode = PreemptionMode.AUTO  # a runner without host pages always recomputes
    tier_reserve: float = 0.04  # share of the pool that is higher tiers' own, never lent to lower ones
    tier_shares: TierWeights = DEFAULT_WEIGHTS  # of computed tokens, guaranteed while a tier has work
    share_window_tokens: int = DEFAULT_WINDOW_TOKENS  # computed tokens over which the shares hold
    # Tokens computed while a request waits for pages and others of its tier pass it by; then they wait for it.
    max_bypass_tokens: int | None = None  # None: as many as the page pool holds

    def __post_init__(self) -> None:
        for name, kind in _RULES.items():
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, kind(value))
            except ValueError as error:
                raise ConfigError(f"{name} must be one of {', '.join(kind)}, not {value!r}") from error
        if not 0 <= self.tier_reserve < 1:
            raise ConfigError(f"tier_reserve must be at least 0 and below 1, not {self.tier_reserve}")
        for name in _LIMITS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            # Every running sequence decodes in every step; with less there would be rows that never advance.
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): each running sequence takes one token of every step",
                hint="Pass a larger --max-num-batched-tokens or a smaller --max-num-seqs.",
            )


_LIMITS = (
    *("max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_prefill_chunk"),
    *("share_window_tokens", "max_bypass_tokens"),
)
_RULES: dict[str, type[StrEnum]] = {
    "policy": Policy,
    "order": QueueOrder,
    "admission": AdmissionRule,
    "eviction": EvictionRule,
    "preemption": PreemptionMode,
}
