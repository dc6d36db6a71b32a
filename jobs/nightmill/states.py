"""Job statuses, shard states, tiers, and the moves between them that are legal."""

from enum import StrEnum


class Tier(StrEnum):
    """Admission class of a job; compared strictly, never by arrival."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"

    @property
    def rank(self) -> int:
        """0 is the most urgent."""
        return _TIER_RANK[self]


_TIER_RANK = {Tier.HIGH: 0, Tier.NORMAL: 1, Tier.LOW: 2}


class JobStatus(StrEnum):
    """What a user sees of a job (OpenAI's batch words)."""

    VALIDATING = "validating"
    """Input is being read and planned; nothing may run yet."""
    QUEUED = "queued"
    """Planned; no shard has been leased yet."""
    IN_PROGRESS = "in_progress"
    """At least one shard has been leased."""
    FINALIZING = "finalizing"
    """Every shard is terminal; the manifest is being written."""
    COMPLETED = "completed"
    """Every input row has its output row (some may carry error_code)."""
    FAILED = "failed"
    """Stopped by an error of the job itself: validation, error budget, every shard discarded."""
    EXPIRED = "expired"
    """`--expires-in` passed first; rows that had not run say so."""
    CANCELLING = "cancelling"
    """Cancel was asked for; workers are stopping."""
    CANCELLED = "cancelled"
    """Cancel took effect; rows that had not run say so."""


class ShardState(StrEnum):
    """Where one contiguous range of input rows stands."""

    AVAILABLE = "available"
    """Nobody holds it; it may be claimed."""
    LEASED = "leased"
    """One attempt holds it until lease_expires_at."""
    COMMITTED = "committed"
    """Its part is final."""
    DISCARDED = "discarded"
    """Its failure budget is used up; a closer wrote its part from checkpoints and error rows."""
    CANCELLED = "cancelled"
    """Its job was cancelled; a closer wrote its part."""
    EXPIRED = "expired"
    """Its job expired; a closer wrote its part."""


JOB_MOVES: dict[JobStatus, frozenset[JobStatus]] = {
    JobStatus.VALIDATING: frozenset({JobStatus.QUEUED, JobStatus.FAILED, JobStatus.CANCELLING}),
    JobStatus.QUEUED: frozenset({JobStatus.IN_PROGRESS, JobStatus.CANCELLING, JobStatus.FAILED, JobStatus.EXPIRED}),
    JobStatus.IN_PROGRESS: frozenset({JobStatus.FINALIZING, JobStatus.CANCELLING, JobStatus.FAILED, JobStatus.EXPIRED}),
    JobStatus.FINALIZING: frozenset({JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.EXPIRED}),
    JobStatus.CANCELLING: frozenset({JobStatus.CANCELLED}),
    # `nightmill retry` reopens a job that has ended, for its rows without an answer: the next generation.
    JobStatus.COMPLETED: frozenset({JobStatus.QUEUED}),
    JobStatus.FAILED: frozenset({JobStatus.QUEUED}),
    JobStatus.EXPIRED: frozenset({JobStatus.QUEUED}),
    JobStatus.CANCELLED: frozenset({JobStatus.QUEUED}),
}

SHARD_MOVES: dict[ShardState, frozenset[ShardState]] = {
    ShardState.AVAILABLE: frozenset({ShardState.LEASED}),
    ShardState.LEASED: frozenset(ShardState) - {ShardState.LEASED},
    # A retry: those with rows to run again become available; a stopped one whose rows all have answers, committed.
    ShardState.COMMITTED: frozenset({ShardState.AVAILABLE}),
    ShardState.DISCARDED: frozenset({ShardState.AVAILABLE, ShardState.COMMITTED}),
    ShardState.CANCELLED: frozenset({ShardState.AVAILABLE, ShardState.COMMITTED}),
    ShardState.EXPIRED: frozenset({ShardState.AVAILABLE, ShardState.COMMITTED}),
}

TERMINAL_JOB = frozenset({JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.EXPIRED, JobStatus.CANCELLED})
OPEN_SHARD = frozenset({ShardState.AVAILABLE, ShardState.LEASED})
TERMINAL_SHARD = frozenset(ShardState) - OPEN_SHARD
