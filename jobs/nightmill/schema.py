"""Tables of the job store. States are CHECK constraints made from states.py; migrations/ brings a database here."""

from collections.abc import Iterable
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    ColumnElement,
    DateTime,
    Dialect,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    bindparam,
    text,
)

from nightmill.states import TERMINAL_SHARD, JobStatus, ShardState, Tier

REVISION = "0003"
"""The migration that ends at these tables. Compared at start, so that alembic is imported only to change something."""


def one_of(column: str, values: Iterable[StrEnum]) -> str:
    """SQL that holds when `column` is one of the values."""
    return f"{column} IN ({', '.join(repr(v.value) for v in sorted(values))})"


def _where(condition: str) -> dict[str, Any]:
    """A partial index. Queries must name the state as a literal, not a parameter, for a planner to find it."""
    return {"sqlite_where": text(condition), "postgresql_where": text(condition)}


class UtcDateTime(TypeDecorator[datetime]):
    """Aware UTC datetimes. SQLite keeps them as text of one width, so that comparing text compares time."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """SQLite gives naive values back, PostgreSQL those of the session's time zone."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


_NAMES = {
    "pk": "pk_%(table_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
}
# SQLite increments only what is declared INTEGER.
_Id = BigInteger().with_variant(Integer, "sqlite")

metadata = MetaData(naming_convention=_NAMES)

jobs = Table(
    "jobs",
    metadata,
    Column("job_id", String(40), primary_key=True),
    Column("status", String(16), nullable=False),
    Column("tier", String(8), nullable=False),
    Column("spec", Text, nullable=False),  # JobSpec, canonical JSON
    Column("spec_digest", String(64), nullable=False),
    Column("model_digest", String(128)),
    Column("options", Text, nullable=False),  # JobOptions, canonical JSON
    Column("output", Text, nullable=False),
    Column("idempotency_key", Text),
    Column("max_failures", Integer, nullable=False),
    Column("generation", Integer, nullable=False, server_default="0"),  # how often it was retried
    Column("source_schema", Text),  # Arrow, base64: of all inputs together, as planned; NULL: a job from before
    Column("num_refusals", Integer, nullable=False, server_default="0"),  # workers that could not load its model
    Column("error_code", String(64)),  # set while still in_progress: the job is failing, shards are being closed
    Column("error_message", Text),
    Column("created_at", UtcDateTime, nullable=False),
    Column("expires_at", UtcDateTime),
    Column("started_at", UtcDateTime),
    Column("finished_at", UtcDateTime),
    CheckConstraint(one_of("status", JobStatus), "status"),
    CheckConstraint(one_of("tier", Tier), "tier"),
    UniqueConstraint("idempotency_key"),
    Index(None, "status", "created_at"),
    Index(None, "output", "created_at"),
)

sources = Table(
    "sources",
    metadata,
    Column("job_id", ForeignKey("jobs.job_id", ondelete="CASCADE"), primary_key=True),
    Column("position", Integer, primary_key=True, autoincrement=False),
    Column("uri", Text, nullable=False),
    Column("num_rows", BigInteger, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("etag", Text),
)


def _counter(name: str) -> Column[int]:
    return Column(name, BigInteger, nullable=False, server_default="0")


shards = Table(
    "shards",
    metadata,
    Column("shard_id", _Id, primary_key=True),
    Column("job_id", ForeignKey("jobs.job_id", ondelete="CASCADE"), nullable=False),
    Column("shard_index", Integer, nullable=False),
    Column("source_file", Text, nullable=False),
    Column("row_start", BigInteger, nullable=False),
    Column("row_end", BigInteger, nullable=False),
    Column("state", String(16), nullable=False),
    Column("attempt", Integer, nullable=False, server_default="0"),
    Column("num_failures", Integer, nullable=False, server_default="0"),
    Column("generation", Integer, nullable=False, server_default="0"),  # the job's, when a retry opened it again
    # The lease.
    Column("worker_id", String(120)),
    Column("claim_token", String(32)),  # tells our own claim, whose answer was lost, from another thread's
    Column("close_as", String(16)),  # a closer's lease: the state its commit lands in
    Column("lease_expires_at", UtcDateTime),
    _counter("rows_durable_at_claim"),
    # Progress: from heartbeats while leased, from the part once terminal.
    _counter("rows_durable"),
    _counter("rows_running"),
    _counter("rows_completed"),
    _counter("rows_failed"),
    _counter("rows_cancelled"),
    _counter("rows_resumed"),
    _counter("rows_recomputed"),
    _counter("prompt_tokens"),
    _counter("completion_tokens"),
    _counter("cached_tokens"),
    Column("progress_at", UtcDateTime),
    # The part. While a retry is open: the one that stands and is to be replaced.
    Column("error_codes", Text),  # JSON: RowErrorCode -> rows
    Column("part_uri", Text),
    Column("part_bytes", BigInteger),
    Column("part_etag", Text),
    # The bell.
    # Last time a message for it was put into the outbox; later by the pause that its rings in vain have earned it.
    Column("rung_at", UtcDateTime),
    Column("num_rings", Integer, nullable=False, server_default="0"),  # in vain, since it became available
    CheckConstraint(one_of("state", ShardState), "state"),
    CheckConstraint(f"close_as IS NULL OR {one_of('close_as', TERMINAL_SHARD - {ShardState.COMMITTED})}", "close_as"),
    CheckConstraint("row_start >= 0 AND row_start < row_end", "range"),
    CheckConstraint(
        "(state = 'leased') = (worker_id IS NOT NULL) AND (state = 'leased') = (lease_expires_at IS NOT NULL)"
        " AND (state = 'leased' OR close_as IS NULL)",
        "lease",
    ),
    CheckConstraint(
        f"NOT ({one_of('state', TERMINAL_SHARD)}) OR (part_uri IS NOT NULL"
        " AND rows_completed + rows_failed + rows_cancelled = row_end - row_start)",
        "every_row_once",
    ),
    CheckConstraint(f"(part_uri IS NOT NULL) = ({one_of('state', TERMINAL_SHARD)} OR generation > 0)", "part"),
    CheckConstraint("generation >= 0 AND (generation = 0 OR part_etag IS NOT NULL)", "generation"),
    UniqueConstraint("job_id", "shard_index"),
    # A heartbeat changes no indexed column: PostgreSQL then writes the row and no index (HOT).
    Index("ix_shards_available", "job_id", "shard_index", **_where("state = 'available'")),
    Index("ix_shards_leased", "job_id", **_where("state = 'leased'")),
    Index("ix_shards_rung", "job_id", "rung_at", **_where("state = 'available'")),
    Index("ix_shards_failing", "job_id", **_where("state = 'available' AND num_failures > 0")),
    postgresql_with={"fillfactor": 70},  # room in each page for the next versions of its rows
)


def in_state(state: ShardState) -> ColumnElement[bool]:
    """A shard in this state. The state is written into the text: only so can the partial indexes be used."""
    return shards.c.state == bindparam(f"in_{state.value}", state.value, literal_execute=True)


def has_failed() -> ColumnElement[bool]:
    """A shard that was charged with a failure; written as an index has it."""
    return shards.c.num_failures > bindparam("no_failures", 0, literal_execute=True)


outbox = Table(
    "outbox",
    metadata,
    Column("outbox_id", _Id, primary_key=True),
    Column("shard_id", ForeignKey("shards.shard_id", ondelete="CASCADE"), nullable=False),
    Column("tier", String(8), nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    CheckConstraint(one_of("tier", Tier), "tier"),
    Index(None, "tier", "outbox_id"),
    Index(None, "shard_id"),
)
