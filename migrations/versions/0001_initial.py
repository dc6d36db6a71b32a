"""Jobs, sources, shards, outbox.

The values of states are written out here: a migration says what was, schema.py what is.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0001"
down_revision: str | Sequence[str] | None = None
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_TIME = sa.DateTime(timezone=True)
_TERMINAL = "state IN ('cancelled', 'committed', 'discarded', 'expired')"


def upgrade() -> None:
    _create_jobs()
    _create_sources()
    _create_shards()
    _create_outbox()


def downgrade() -> None:
    for table in ("outbox", "shards", "sources", "jobs"):
        op.drop_table(table)  # takes its indexes along


def _check(table: str, name: str, condition: str) -> sa.CheckConstraint:
    return sa.CheckConstraint(condition, name=op.f(f"ck_{table}_{name}"))


def _create_jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("tier", sa.String(8), nullable=False),
        sa.Column("spec", sa.Text(), nullable=False),
        sa.Column("spec_digest", sa.String(64), nullable=False),
        sa.Column("model_digest", sa.String(128)),
        sa.Column("options", sa.Text(), nullable=False),
        sa.Column("output", sa.Text(), nullable=False),
        sa.Column("idempotency_key", sa.Text()),
        sa.Column("max_failures", sa.Integer(), nullable=False),
        sa.Column("error_code", sa.String(64)),
        sa.Column("error_message", sa.Text()),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("expires_at", _TIME),
        sa.Column("started_at", _TIME),
        sa.Column("finished_at", _TIME),
        _check(
            "jobs",
            "status",
            "status IN ('cancelled', 'cancelling', 'completed', 'expired', 'failed', 'finalizing', 'in_progress',"
            " 'queued', 'validating')",
        ),
        _check("jobs", "tier", "tier IN ('high', 'low', 'normal')"),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_jobs")),
        sa.UniqueConstraint("idempotency_key", name=op.f("uq_jobs_idempotency_key")),
    )
    op.create_index("ix_jobs_output_created_at", "jobs", ["output", "created_at"])
    op.create_index("ix_jobs_status_created_at", "jobs", ["status", "created_at"])


def _create_sources() -> None:
    op.create_table(
        "sources",
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("position", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("uri", sa.Text(), nullable=False),
        sa.Column("num_rows", sa.BigInteger(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("etag", sa.Text()),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name=op.f("fk_sources_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "position", name=op.f("pk_sources")),
    )


def _create_shards() -> None:
    counters = [
        *("rows_durable_at_claim", "rows_durable", "rows_running", "rows_completed", "rows_failed", "rows_cancelled"),
        *("rows_resumed", "rows_recomputed", "prompt_tokens", "completion_tokens", "cached_tokens"),
    ]
    op.create_table(
        "shards",
        sa.Column("shard_id", _ID, nullable=False),
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("shard_index", sa.Integer(), nullable=False),
        sa.Column("source_file", sa.Text(), nullable=False),
        sa.Column("row_start", sa.BigInteger(), nullable=False),
        sa.Column("row_end", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("attempt", sa.Integer(), server_default="0", nullable=False),
        sa.Column("num_failures", sa.Integer(), server_default="0", nullable=False),
        sa.Column("worker_id", sa.String(120)),
        sa.Column("claim_token", sa.String(32)),
        sa.Column("close_as", sa.String(16)),
        sa.Column("lease_expires_at", _TIME),
        *(sa.Column(name, sa.BigInteger(), server_default="0", nullable=False) for name in counters),
        sa.Column("progress_at", _TIME),
        sa.Column("error_codes", sa.Text()),
        sa.Column("part_uri", sa.Text()),
        sa.Column("part_bytes", sa.BigInteger()),
        sa.Column("part_etag", sa.Text()),
        sa.Column("rung_at", _TIME),
        _check("shards", "state", "state IN ('available', 'cancelled', 'committed', 'discarded', 'expired', 'leased')"),
        _check("shards", "close_as", "close_as IS NULL OR close_as IN ('cancelled', 'discarded', 'expired')"),
        _check("shards", "range", "row_start >= 0 AND row_start < row_end"),
        _check(
            "shards",
            "lease",
            "(state = 'leased') = (worker_id IS NOT NULL) AND (state = 'leased') = (lease_expires_at IS NOT NULL)"
            " AND (state = 'leased' OR close_as IS NULL)",
        ),
        _check(
            "shards",
            "every_row_once",
            f"NOT ({_TERMINAL}) OR (part_uri IS NOT NULL"
            " AND rows_completed + rows_failed + rows_cancelled = row_end - row_start)",
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name=op.f("fk_shards_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("shard_id", name=op.f("pk_shards")),
        sa.UniqueConstraint("job_id", "shard_index", name=op.f("uq_shards_job_id_shard_index")),
    )
    op.create_index("ix_shards_state_lease_expires_at", "shards", ["state", "lease_expires_at"])
    op.create_index("ix_shards_worker_id", "shards", ["worker_id"])


def _create_outbox() -> None:
    op.create_table(
        "outbox",
        sa.Column("outbox_id", _ID, nullable=False),
        sa.Column("shard_id", _ID, nullable=False),
        sa.Column("tier", sa.String(8), nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        _check("outbox", "tier", "tier IN ('high', 'low', 'normal')"),
        sa.ForeignKeyConstraint(["shard_id"], ["shards.shard_id"], name=op.f("fk_outbox_shard_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("outbox_id", name=op.f("pk_outbox")),
    )
