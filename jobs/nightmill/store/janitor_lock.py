"""One janitor at a time, as far as it can be known: what janitors do is safe to do twice, only wasteful."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from nightmill.store.database import STALLED_S, Database

_KEY = 0x6E69676874 + 1  # next to the migrations'
_LIMIT = text(  # the setting came with PostgreSQL 14
    "SELECT set_config('idle_session_timeout', :limit, false)"
    " WHERE current_setting('server_version_num')::int >= 140000"
)


@contextmanager
def janitor_lock(database: Database) -> Iterator[bool]:
    """True inside: nobody else is told so until we leave, or our connection is lost.

    PostgreSQL: a lock of the session, so the server drops it when the process dies, or after `STALLED_S`: a process
    that stands still keeps its connections, and nobody would take back what the dead held for as long as it does. A
    sweep that takes longer goes on without the lock. The connection stays out of the pool meanwhile and in no
    transaction: it holds up neither vacuum nor others.
    """
    if database.is_sqlite:
        yield True
        return
    connection = database.retried(partial(_try_lock, database))
    try:
        yield connection is not None
    finally:
        if connection is not None:
            _unlock(connection)
            connection.close()


def _try_lock(database: Database) -> Connection | None:
    connection = database.engine.connect()
    try:
        connection.execution_options(isolation_level="AUTOCOMMIT")
        if connection.scalar(text("SELECT pg_try_advisory_lock(:key)"), {"key": _KEY}):
            connection.execute(_LIMIT, {"limit": f"{STALLED_S}s"})
            return connection
    except BaseException:
        connection.invalidate()
        connection.close()
        raise
    connection.close()
    return None


def _unlock(connection: Connection) -> None:
    try:
        connection.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": _KEY})
        connection.execute(_LIMIT, {"limit": "0"})  # it goes back to the pool
    except DBAPIError:
        connection.invalidate()  # closing the session unlocks, too
