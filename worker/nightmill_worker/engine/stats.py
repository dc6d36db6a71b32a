"""What the engine has done and how it stands. docs/metrics.md lists every field."""

from collections.abc import Sequence
from dataclasses import dataclass

from nightmill.states import Tier


@dataclass(slots=True)
class Counters:
    """Running totals, written by the scheduler and the loop."""

    steps: int = 0
    steps_ahead: int = 0
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
    preemptions_memory_swap: int = 0
    preemptions_tier_swap: int = 0
    batch_rows: int = 0
    shared_attention_rows: int = 0
    shared_attention_bytes: int = 0
    peak_pages: int = 0
    plan_s: float = 0.0
    build_s: float = 0.0
    wait_s: float = 0.0
    run_s: float = 0.0
    device_s: float = 0.0
    bound_s: float = 0.0
    bytes: float = 0.0
    flops: float = 0.0
    commit_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkStats:
    """What one job has had of the engine in one tier. The entry without a job sums up those that were forgotten."""

    job_id: str
    tier: Tier
    waiting: int  # parked and swapped ones included
    running: int
    swapped: int  # of the waiting: their KV is on the host
    finished: int  # with an answer
    errors: int
    aborted: int
    prompt_tokens: int  # of sequences admitted, each counted once
    cached_tokens: int  # of those, taken from the prefix index at first admission
    computed_tokens: int
    recomputed_tokens: int
    generated_tokens: int
    preemptions: int  # of sequences that have ended
    engine_ns: int  # its share of the engine's time, by computed tokens; over all jobs, with idle_ns: wall_ns, exactly
    remaining_tokens: int  # to compute yet for what is here, answers as long as expected; without those taken off
    eta_s: float | None  # for those, at the pace of the last seconds; None while it has none


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Totals since the loop was made, and the state after its last step."""

    steps: int
    steps_ahead: int  # of those, decided and submitted while the step before was running
    finished: int  # with an answer
    errors: int
    aborted: int
    prompt_tokens: int  # of sequences admitted, each counted once
    cached_tokens: int  # of those, taken from the prefix index at first admission
    computed_tokens: int  # prefill and decode, without padding
    recomputed_tokens: int  # of those, computed before and lost to a preemption
    padding_tokens: int  # computed for rows that had ended (static policy; steps that run ahead)
    generated_tokens: int
    running: int
    waiting: int  # parked ones included
    parked: int  # waiting for a prefix that is being computed
    preemptions: int
    preemptions_memory: int  # of those: the page pool had run out, or was about to
    preemptions_tier: int  # of those: a more urgent sequence took its place
    preemptions_swap: int  # of those: by swap, the others by recompute
    preemptions_memory_swap: int  # by cause and mode
    preemptions_tier_swap: int
    swapped: int  # waiting sequences whose KV is on the host
    host_pages_total: int
    host_pages_used: int
    pages_total: int  # without the null page
    pages_free: int
    pages_cached: int  # published, held by nobody: evicted on demand
    pages_active: int
    pages_in_flight: int  # let go, and free as soon as the steps that use them have ended
    peak_pages: int  # most pages ever active in a step
    predicted_peak_pages: float | None  # by the gate, at the last admission it had to predict for
    z: float | None  # standard deviations of the prediction that stay free; None: another gate
    evictions: int  # cached pages given up for others
    wanted_evictions: int  # of those, with a waiting request that would have used them
    shared_attention_rows: int  # rows of all steps that were in a prefix group
    shared_attention_bytes_saved: int  # of KV that attention did not read again; layers with a window counted too
    mean_batch: float  # sequences per step, without padding
    plan_s: float  # host time: deciding
    build_s: float  # host time: packing the step's arrays
    wait_s: float  # host time: between steps, with work there: requests taken in, reports sent
    run_s: float  # in the runner: the device and the draws; of steps that run ahead, what the host waits for
    device_s: float  # what the runner says the device took; where it does not say, from a step's begin to its end
    commit_s: float  # host time: tokens, stops, pages
    bound_s: float  # the least the device could have taken, by its measured ceilings; 0 where they were not measured
    bytes: float  # of weights and KV that steps had to read and write, each once
    flops: float  # that they had to compute
    wall_ns: int  # since the loop was made
    idle_ns: int  # of those, without work
    work: tuple[WorkStats, ...] | None = None  # by job and tier; None: not asked for

    @property
    def roofline_share(self) -> float | None:
        """How near the steps came to the least they could take: 1 is the roofline. None: it was not measured."""
        return roofline_share([self])

    @property
    def tokens_per_step(self) -> float:
        """Computed tokens."""
        return self.computed_tokens / self.steps if self.steps else 0.0


def roofline_share(stats: Sequence[EngineStats]) -> float | None:
    """Of several engines, one after the other; see EngineStats.roofline_share."""
    # Where steps run ahead, the host waits for less than the device takes; elsewhere a runner may name less than that.
    spent = sum(max(one.run_s, one.device_s) for one in stats)
    bound = sum(one.bound_s for one in stats)
    return bound / spent if spent and bound else None
