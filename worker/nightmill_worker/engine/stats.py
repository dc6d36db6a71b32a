"""What the engine has done and how it stands."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Running totals, written by the scheduler and the loop."""

    steps: int = 0
    finished: int = 0
    errors: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    padding_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    preemptions_memory: int = 0
    preemptions_tier: int = 0
    preemptions_swap: int = 0
    batch_rows: int = 0
    shared_attention_rows: int = 0
    shared_attention_bytes: int = 0
    plan_s: float = 0.0
    run_s: float = 0.0
    commit_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Totals since the loop was made, and the state after its last step."""

    steps: int
    finished: int  # with an answer
    errors: int
    aborted: int
    prompt_tokens: int  # of sequences admitted, each counted once
    cached_tokens: int  # of those, taken from the prefix index at first admission
    computed_tokens: int  # prefill and decode, without padding
    recomputed_tokens: int  # of those, computed before and lost to a preemption
    padding_tokens: int  # computed for rows that had ended (static policy)
    generated_tokens: int
    running: int
    waiting: int  # parked ones included
    parked: int  # waiting for a prefix that is being computed
    preemptions: int
    preemptions_memory: int  # of those: the page pool had run out, or was about to
    preemptions_tier: int  # of those: a more urgent sequence took its place
    preemptions_swap: int  # of those: by swap, the others by recompute
    swapped: int  # waiting sequences whose KV is on the host
    host_pages_total: int
    host_pages_used: int
    pages_total: int  # without the null page
    pages_free: int
    pages_cached: int  # published, held by nobody: evicted on demand
    pages_active: int
    pages_in_flight: int
    evictions: int  # cached pages given up for others
    wanted_evictions: int  # of those, with a waiting request that would have used them
    shared_attention_rows: int  # rows of all steps that were in a prefix group
    shared_attention_bytes_saved: int  # of KV that attention did not read again; layers with a window counted too
    mean_batch: float  # sequences per step, without padding
    plan_s: float  # host time: deciding and packing
    run_s: float  # in the runner
    commit_s: float  # host time: tokens, stops, pages
