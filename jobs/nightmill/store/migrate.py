"""Bring a database to the tables of schema.py, once, whoever comes first."""

from pathlib import Path

from sqlalchemy import Connection, inspect, text

import nightmill
from nightmill.errors import ConfigError
from nightmill.schema import REVISION
from nightmill.store.database import Database

_ADVISORY_LOCK = 0x6E69676874  # "night"


def migrations_dir() -> Path:
    """The migrations: inside the package when installed from a wheel, at the top of a checkout."""
    package = Path(nightmill.__file__).parent
    installed = package / "migrations"
    return installed if installed.is_dir() else package.parents[1] / "migrations"


def migrate(database: Database, revision: str = REVISION) -> None:
    """Upgrade from empty or older to `revision`; costs one SELECT when there is nothing to do.

    Several processes may call it at once: one works, the others wait for it.

    Raises:
        ConfigError: the database was made by a newer nightmill.
    """
    if database.read(current_revision) != revision:
        database.write(lambda connection: _upgrade(connection, revision))


def current_revision(connection: Connection) -> str | None:
    """The migration the database stands at; None when it is empty."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    revision: str | None = connection.scalar(text("SELECT version_num FROM alembic_version"))
    return revision


def _upgrade(connection: Connection, revision: str) -> None:
    from alembic import command
    from alembic.config import Config
    from alembic.util import CommandError

    if connection.dialect.name == "postgresql":  # SQLite: BEGIN IMMEDIATE is the lock
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})
    current = current_revision(connection)
    if current == revision:
        return
    config = Config()
    config.set_main_option("script_location", str(migrations_dir()).replace("%", "%%"))
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, revision)
    except CommandError as error:
        raise ConfigError(
            f"the job store stands at migration {current}, unknown to nightmill {nightmill.__version__}",
            hint="it was made by a newer nightmill: upgrade, or set NIGHTMILL_HOME to another folder",
        ) from error
