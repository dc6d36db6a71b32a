"""Small frozen records that cross module seams of the control plane and the worker."""

from dataclasses import dataclass, field
from datetime import datetime

from nightmill.sampling import SamplingParams
from nightmill.states import JobStatus, ShardState, Tier
from nightmill.tier_weights import DEFAULT_WEIGHTS, TierWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Which model, and how it is loaded: all of it changes answers."""

    model: str  # local directory, .gguf file, hub id, s3://…, or "demo"
    revision: str | None = None
    dtype: str = "auto"  # auto | bfloat16 | float16 | float32
    quantization: str | None = None  # int8: weights of the layers, on CPUs
    load_format: str = "auto"  # auto | dummy
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """Everything that changes a job's answers or its output's form. Its digest fences the output folder."""

    inputs: tuple[str, ...]
    output: str
    model: ModelSpec
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    prompt_column: str | None = None  # None: `prompt`, else `messages`, whichever the input has
    messages_column: str | None = None
    system_prompt: str | None = None
    chat: bool | None = None  # None: when the model has a chat template
    output_column: str = "completion"
    output_prefix: str = ""
    strict: bool = False
    allow_duplicate_ids: bool = False
    check_ids: bool = True


DEFAULT_LOOK_AHEAD = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How fast and in how much memory, never what is answered: not part of the spec digest."""

    device: str = "auto"  # auto: a GPU where there is one; or cpu, cuda
    page_size: int | None = None  # tokens; None: by device
    max_num_seqs: int | None = None  # rows in the batch; None: by device
    max_num_batched_tokens: int | None = None  # tokens in one step; None: by device
    enable_prefix_caching: bool = True
    enable_shared_attention: bool = True
    gpu_memory_utilization: float = 0.9  # of a GPU's memory: weights, KV pool and all
    enforce_eager: bool = False  # GPU: no recorded graphs
    async_scheduling: bool | None = None  # decide a step while the one before runs; None: on a GPU
    pool_bytes: int | None = None  # KV pool; None: by device
    swap_bytes: int | None = None  # host pool for preempted sequences; None: by device, 0: none
    num_threads: int | None = None  # CPU threads of the engine; None: by machine
    look_ahead: int = DEFAULT_LOOK_AHEAD  # rows of a tier that may wait in the engine, for its planner
    tier_shares: TierWeights = DEFAULT_WEIGHTS  # of computed tokens, guaranteed while a tier has work


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """Scheduling and limits of a job; not part of the spec digest."""

    tier: Tier = Tier.NORMAL
    shard_rows: int = 2000
    max_failed_rows: int | None = None
    max_failures: int = 5  # process deaths without a newly checkpointed row before a shard is discarded
    idempotency_key: str | None = None
    expires_in_s: float | None = None  # from creation; rows that have not run by then say so


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One input object as planned."""

    uri: str
    num_rows: int
    size_bytes: int
    etag: str | None = None  # object store; local files: "mtime_ns-size"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRange:
    """A contiguous row range of one input object, before it has an id."""

    index: int  # 0-based in the job; names the part
    source_file: str
    row_start: int
    row_end: int  # exclusive

    @property
    def num_rows(self) -> int:
        """Rows in the range."""
        return self.row_end - self.row_start


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLease:
    """A claimed shard: the attempt is the fencing token of every write."""

    shard_id: int
    job_id: str
    range: ShardRange
    attempt: int  # starts at 1
    num_failures: int  # earlier attempts that died without checkpointing a new row
    worker_id: str
    close_as: ShardState | None = None  # a closer's lease: the state its commit lands in, instead of committed
    generation: int = 0  # how often the job was retried when this shard was opened; 0: its part does not exist yet
    replaces_etag: str | None = None  # generation > 0: the etag of the part that stands, and that this attempt replaces


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """A message to send: this shard may be claimed."""

    shard_id: int
    tier: Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """Counts of a job or shard. After the end: completed + failed + cancelled = total."""

    total: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """Tokens of a job or shard, over rows that have a completion."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardProgress:
    """What a heartbeat says of one leased shard. Shown to users, never trusted for the result."""

    attempt: int  # the lease's: a heartbeat for an older attempt renews nothing
    rows_completed: int = 0  # finished so far, rows of earlier attempts included
    rows_failed: int = 0
    rows_running: int = 0  # in the engine now
    rows_durable: int = 0  # in checkpoints, earlier attempts included; growth clears the failure count
    tokens: TokenCounts = field(default_factory=TokenCounts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardResult:
    """What a commit records: read from the part that stands at `part_uri`, whoever wrote it."""

    rows: RowCounts
    tokens: TokenCounts
    error_codes: dict[str, int]  # RowErrorCode -> rows
    part_uri: str
    part_bytes: int
    part_etag: str
    rows_resumed: int = 0  # taken from checkpoints of earlier attempts
    rows_recomputed: int = 0  # computed again although an earlier attempt had finished them


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedShard:
    """A terminal shard, as the manifest lists it."""

    shard_id: int
    range: ShardRange
    state: ShardState  # committed | discarded | cancelled | expired
    attempt: int  # the one whose commit was accepted
    result: ShardResult


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInfo:
    """What `status` shows of a job."""

    job_id: str
    status: JobStatus
    spec_digest: str
    spec: JobSpec
    options: JobOptions
    rows: RowCounts
    tokens: TokenCounts
    num_shards: int
    num_shards_by_state: dict[ShardState, int]
    error_codes: dict[str, int] = field(default_factory=dict)
    error_code: str | None = None  # of the job itself
    error_message: str | None = None
    model_digest: str | None = None  # content digest of the resolved model
    rows_running: int = 0
    rows_resumed: int = 0
    rows_recomputed: int = 0
    generation: int = 0  # how often it was retried
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    last_progress_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A row's final answer or its permanent error: what a checkpoint holds and a part is built from.

    Exactly one of (`text`, `finish_reason`) and (`error_code`, `error_message`) is set.
    """

    row_index: int
    custom_id: str
    text: str | None = None
    finish_reason: str | None = None  # stop | length | tool_calls | content_filter
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    error_code: str | None = None
    error_message: str | None = None
    attempts: int = 1
    seed: int | None = None
    max_tokens_effective: int | None = None
    logprobs: str | None = None  # JSON, OpenAI's form; None when not asked
