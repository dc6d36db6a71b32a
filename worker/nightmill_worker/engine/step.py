"""The seam between policy and mechanism: what one step computes, as flat arrays.

The scheduler decides, the loop packs its decision into a StepPlan, a Runner executes it. Arrays may be views of
preallocated buffers: a Runner must not keep them after `run` returns.
"""

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from nightmill_worker.engine.request import TokenLogprobs

NULL_PAGE = 0
"""Page 0 is never real data: padding reads and writes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBatch:
    """The R sequences of a step that draw a token, with their parameters, one array element each."""

    sequence: NDArray[np.int32]  # [R] index into the step's sequences
    token_index: NDArray[np.int32]  # [R] index into the step's flat tokens: the last token of the sequence
    position: NDArray[np.int64]  # [R] index in the sequence of the token being drawn; key of the random draw
    seed: NDArray[np.uint64]  # [R]
    temperature: NDArray[np.float32]  # [R] 0 = greedy
    top_k: NDArray[np.int32]  # [R] 0 = all
    top_p: NDArray[np.float32]  # [R] 1 = all
    min_p: NDArray[np.float32]  # [R] 0 = all
    presence_penalty: NDArray[np.float32]  # [R] 0 = none
    frequency_penalty: NDArray[np.float32]  # [R] 0 = none
    repetition_penalty: NDArray[np.float32]  # [R] 1 = none
    num_logprobs: NDArray[np.int32]  # [R] -1 = not asked
    any_random: bool
    # Only rows that need them appear below, keyed by their index in [0, R).
    history: dict[int, tuple[NDArray[np.int32], int]] = field(default_factory=dict)  # tokens so far, prompt length
    banned: dict[int, NDArray[np.int32]] = field(default_factory=dict)  # ids that must not be drawn (min_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixGroups:
    """Sequences of a step whose first pages are the same page ids. Each has one token, and is in one group at most."""

    starts: NDArray[np.int32]  # [N + 1] group n owns sequences[starts[n]:starts[n+1]]
    sequences: NDArray[np.int32]  # [M] indices into the step's sequences
    num_pages: NDArray[np.int32]  # [N] full pages from the first on that are the same for the group


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One forward over S sequences and T tokens. A decode is a sequence with one token; nothing else tells it apart."""

    step: int
    token_ids: NDArray[np.int32]  # [T] sequence after sequence
    positions: NDArray[np.int32]  # [T]
    slots: NDArray[np.int64]  # [T] page * page_size + offset, where each token's K and V go
    query_starts: NDArray[np.int32]  # [S + 1] sequence s owns tokens query_starts[s]:query_starts[s+1]
    context_lens: NDArray[np.int32]  # [S] tokens visible to the sequence's last token in this step, itself included
    page_tables: NDArray[np.int32]  # [S, P] page ids; columns past ceil(context_len / page_size) are NULL_PAGE
    sample: SampleBatch
    groups: PrefixGroups | None = None  # a hint: a Runner may compute what they share once, or ignore them
    # [T] -1: as in token_ids; else the token drawn for this row of the SampleBatch of the step submitted before
    token_source: NDArray[np.int32] | None = None

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.context_lens)

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What a step drew: one token for each row of the plan's SampleBatch, in its order."""

    tokens: NDArray[np.int32]  # [R]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by row in [0, R), where asked
    failed: dict[int, str] = field(default_factory=dict)  # by row in [0, R): non-finite logits and the like
    seconds: float | None = None  # what the device says the step took; None: as long as the call


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShape:
    """Size of the KV page pool a Runner holds."""

    num_pages: int  # null page included
    page_size: int  # tokens
    bytes_per_token: int  # 2 · layers · kv_heads · head_dim · bytes per element


class Runner(Protocol):
    """Executes steps. The model's runner and the engine's fake pass the same contract suite."""

    @property
    def pool(self) -> PoolShape:
        """The page pool this runner owns."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are in [0, vocab_size)."""
        ...

    def run(self, plan: StepPlan) -> StepOutput:
        """Write K and V of every token to its slot, attend over the page tables, draw the sampled tokens."""
        ...

    def close(self) -> None:
        """Free the pool and the weights."""
        ...


@runtime_checkable
class RunsAhead(Protocol):
    """A Runner that can be given a step before the one before it has ended. Steps run in the order of the calls.

    At most two are in flight. `run` is `submit` and `collect`, with nothing else in flight.
    """

    def submit(self, plan: StepPlan) -> None:
        """Begin a step; the plan's arrays may change as soon as this returns. `plan.token_source` may be set."""
        ...

    def collect(self) -> StepOutput:
        """Wait for the oldest step in flight."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HostShape:
    """The host pool a runner swaps to, and how fast."""

    num_pages: int  # of the page pool's page size; 0: no swap
    bytes_per_s: float  # out and in, measured when the runner was built


@runtime_checkable
class Swaps(Protocol):
    """A Runner that can also keep pages on the host. Without it, preemption recomputes.

    Copies take effect in the order of the calls, `run` included: what `run` wrote before a `swap_out` is copied, and
    when `swap_out` has returned its pages may be given to anyone, since whatever writes to them comes after. A device
    that works behind the caller's back has to keep this up: see docs/adr/0002-preemption.md.
    """

    @property
    def host(self) -> HostShape:
        """The host pool this runner owns."""
        ...

    def swap_out(self, pages: NDArray[np.int32], host_pages: NDArray[np.int32]) -> None:
        """Copy page `pages[i]` of the pool to `host_pages[i]`, bit for bit. Neither holds an id twice."""
        ...

    def swap_in(self, host_pages: NDArray[np.int32], pages: NDArray[np.int32]) -> None:
        """Copy `host_pages[i]` to page `pages[i]` of the pool, bit for bit. Neither holds an id twice."""
        ...
