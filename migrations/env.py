"""Runs migrations on the connection nightmill gives, or (for `alembic revision`) on DATABASE_URL."""

from alembic import context
from sqlalchemy import Connection

from nightmill.config import Settings
from nightmill.schema import metadata
from nightmill.store.database import Database


def run(connection: Connection) -> None:
    # SQLite cannot alter a table in place: batch mode copies it.
    context.configure(connection=connection, target_metadata=metadata, render_as_batch=True)
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    Database(Settings.from_env().database_url).write(run)
