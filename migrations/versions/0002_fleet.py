"""The fleet: generations of a retry, rings, and indexes that heartbeats do not touch."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0002"
down_revision: str | Sequence[str] | None = "0001"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_TERMINAL = "state IN ('cancelled', 'committed', 'discarded', 'expired')"
_AVAILABLE = sa.text("state = 'available'")
_LEASED = sa.text("state = 'leased'")
_CHECKS = {
    "part": f"(part_uri IS NOT NULL) = ({_TERMINAL} OR generation > 0)",
    "generation": "generation >= 0 AND (generation = 0 OR part_etag IS NOT NULL)",
}
_PARTIAL = [
    ("ix_shards_available", ["job_id", "shard_index"], _AVAILABLE),
    ("ix_shards_leased", ["job_id"], _LEASED),
    ("ix_shards_failing", ["job_id"], sa.text("state = 'available' AND num_failures > 0")),
]
_COLUMNS = ("generation", "num_rings")


def upgrade() -> None:
    op.add_column("jobs", _number("generation"))
    op.drop_index("ix_shards_state_lease_expires_at", "shards")
    op.drop_index("ix_shards_worker_id", "shards")
    # On SQLite this makes the table anew, and dropping the old one empties the outbox: nobody rings there.
    with op.batch_alter_table("shards") as shards:
        for name in _COLUMNS:
            shards.add_column(_number(name))
        for name, condition in _CHECKS.items():
            shards.create_check_constraint(op.f(f"ck_shards_{name}"), condition)
    for name, columns, rows in _PARTIAL:
        op.create_index(name, "shards", columns, sqlite_where=rows, postgresql_where=rows)
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER TABLE shards SET (fillfactor = 70)")
    op.create_index("ix_outbox_tier_outbox_id", "outbox", ["tier", "outbox_id"])
    op.create_index("ix_outbox_shard_id", "outbox", ["shard_id"])


def downgrade() -> None:
    """What a retry has opened and not ended cannot be told in the old tables: the database refuses such rows."""
    op.drop_index("ix_outbox_shard_id", "outbox")
    op.drop_index("ix_outbox_tier_outbox_id", "outbox")
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER TABLE shards RESET (fillfactor)")
    for name, _, _ in _PARTIAL:
        op.drop_index(name, "shards")
    with op.batch_alter_table("shards") as shards:
        for name in _CHECKS:
            shards.drop_constraint(op.f(f"ck_shards_{name}"), type_="check")
        for name in reversed(_COLUMNS):
            shards.drop_column(name)
    op.create_index("ix_shards_worker_id", "shards", ["worker_id"])
    op.create_index("ix_shards_state_lease_expires_at", "shards", ["state", "lease_expires_at"])
    op.execute("ALTER TABLE jobs DROP COLUMN generation")  # a batch would drop the table, and all that refers to it


def _number(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.Integer(), server_default="0", nullable=False)
