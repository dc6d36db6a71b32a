"""Inputs that may go away, models that may not load, and rings found in the order in which they are due."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0003"
down_revision: str | Sequence[str] | None = "0002"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_LONG_AGO = "1970-01-01 00:00:00.000000"
_AVAILABLE = sa.text("state = 'available'")


def upgrade() -> None:
    op.add_column("jobs", sa.Column("source_schema", sa.Text()))
    op.add_column("jobs", sa.Column("num_refusals", sa.Integer(), server_default="0", nullable=False))
    # An index cannot find what was never rung.
    op.execute(f"UPDATE shards SET rung_at = '{_LONG_AGO}' WHERE state = 'available' AND rung_at IS NULL")
    op.create_index(
        "ix_shards_rung", "shards", ["job_id", "rung_at"], sqlite_where=_AVAILABLE, postgresql_where=_AVAILABLE
    )


def downgrade() -> None:
    op.drop_index("ix_shards_rung", "shards")
    op.execute(f"UPDATE shards SET rung_at = NULL WHERE rung_at = '{_LONG_AGO}'")
    for name in ("num_refusals", "source_schema"):
        op.execute(f"ALTER TABLE jobs DROP COLUMN {name}")  # a batch would drop the table, and all that refers to it
