"""Connections and transactions: SQLite's pragmas, and the retry of whole transactions."""

import itertools
import random
import re
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from nightmill.errors import ConfigError, StorageError, StoreError

Result = TypeVar("Result")

BUSY_TIMEOUT_S = 30.0
STALLED_S = 20
"""A process that stands still (stopped, its machine paused) keeps its locks so long: less than a lease lives."""
_MAX_TRIES = 8
_MAX_TRIES_AWAY = 16  # about 25 s: a server that crashed is back by then, and leases live for 30 s
_MIN_SQLITE = (3, 35, 0)  # RETURNING
_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
# Classes and codes of SQLSTATE that a new try can heal: connection, serialization and deadlock, shutdown, lock timeout.
_RETRY_SQLSTATE = ("08", "40", "57P", "55P03", "25P03")


class Database:
    """An engine whose transactions can be retried whole: give it functions that may run more than once."""

    def __init__(self, url: str) -> None:
        self.url = _parse(url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        if self.is_sqlite:
            self.engine = _sqlite_engine(url, Path(self.url.database or ""))
        else:
            self.engine = _postgres_engine(url)

    def write(self, function: Callable[[Connection], Result]) -> Result:
        """Run `function` in one transaction that may write; again from its start when the database says so.

        The answer to a COMMIT can be lost: `function` must give the same answer when its first run did take effect.
        """
        return self.retried(lambda: self._run(function, {}))

    def read(self, function: Callable[[Connection], Result]) -> Result:
        """Run `function` on one consistent view; takes no lock that a writer waits for."""
        options: dict[str, Any] = {"nightmill_read_only": True}
        if not self.is_sqlite:
            options |= {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
        return self.retried(lambda: self._run(function, options))

    def _run(self, function: Callable[[Connection], Result], options: dict[str, Any]) -> Result:
        with self.engine.connect() as connection:
            connection.execution_options(**options)
            with connection.begin():
                return function(connection)

    def retried(self, function: Callable[[], Result]) -> Result:
        """Call it again while the database is busy, or away: a server that crashes comes back within seconds."""
        for attempt in itertools.count(1):
            try:
                return function()
            except (DBAPIError, PoolTimeoutError) as error:
                tries = _MAX_TRIES_AWAY if is_away(error) else _MAX_TRIES
                if not can_retry(error) or attempt >= tries:
                    raise _explain(error, self.url) from error
            time.sleep(min(2.0, 0.05 * 2**attempt) * random.uniform(0.5, 1.0))
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()


def _parse(text: str) -> URL:
    try:
        url = make_url(text)
        if "@" not in (url.host or ""):
            return url
    except (ValueError, ArgumentError):
        pass  # its text may quote the password
    raise ConfigError(
        "DATABASE_URL: user, password, host and port cannot be told apart",
        hint="the port is a number; in user and password write @ as %40, / as %2F, : as %3A, % as %25",
    )


def can_retry(error: DBAPIError | PoolTimeoutError) -> bool:
    """True when the same transaction may succeed a moment later: a lock, a deadlock, a lost connection."""
    if isinstance(error, PoolTimeoutError):
        return True
    if isinstance(error.orig, sqlite3.Error):
        return _sqlite_code(error.orig) in _BUSY
    sqlstate = getattr(error.orig, "sqlstate", None)
    return is_away(error) if sqlstate is None else str(sqlstate).startswith(_RETRY_SQLSTATE)


def is_away(error: DBAPIError | PoolTimeoutError) -> bool:
    """True when the server cannot be reached, has closed the connection, or is just starting or stopping."""
    if isinstance(error, PoolTimeoutError) or isinstance(error.orig, sqlite3.Error):
        return False
    sqlstate = getattr(error.orig, "sqlstate", None)
    if sqlstate is not None:
        return str(sqlstate).startswith(("08", "57P"))
    # psycopg: whatever goes wrong while connecting has no code, also what no patience heals.
    return isinstance(error, OperationalError | InterfaceError) and not _REFUSED.search(str(error.orig))


# FATAL is the server's own word, in English with C messages; "starting up", "shutting down" and "too many" pass.
_REFUSED = re.compile(r"(database|role) \".*\" does not exist|authentication failed|no pg_hba\.conf entry|no password")


def _explain(error: DBAPIError | PoolTimeoutError, to: URL) -> Exception:
    """Trouble of the machine becomes a StorageError; anything else is a bug of ours and keeps its traceback."""
    cause = str(getattr(error, "orig", error)).strip()
    url = to.render_as_string(hide_password=True)
    if isinstance(error, DBAPIError) and isinstance(error.orig, sqlite3.Error) and _sqlite_code(error.orig) in _DAMAGED:
        return StoreError(
            f"the job store {url} is damaged, or no database at all: {cause}",
            hint="move that file away: a new store finds unfinished jobs again by the folders they write to",
        )
    if "invalid connection option" in cause:  # psycopg takes it for an error of its caller's
        return ConfigError(f"DATABASE_URL: {cause}", hint="options after the ? are those of libpq: ?sslmode=require")
    if isinstance(error, OperationalError | PoolTimeoutError | InterfaceError) and to.get_backend_name() != "sqlite":
        return StoreError(
            f"the job store {url} failed: {cause}",
            hint="check that PostgreSQL runs there and DATABASE_URL is right; the same command again resumes",
        )
    if isinstance(error, OperationalError | PoolTimeoutError):
        return StoreError(
            f"the job store {url} failed: {cause}",
            hint="check that its disk has room and you may write there; the same command again resumes",
        )
    return error


def _sqlite_code(error: sqlite3.Error) -> int:
    code: int = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF  # without the extension


def _sqlite_engine(url: str, path: Path) -> Engine:
    if sqlite3.sqlite_version_info < _MIN_SQLITE:
        raise ConfigError(f"SQLite {sqlite3.sqlite_version} is too old: this Python needs 3.35 or newer")
    if not path.name or str(path) == ":memory:":
        raise ConfigError("DATABASE_URL: the store must be a file, so that several processes can share it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"cannot make the folder of the job store: {error}", hint="set NIGHTMILL_HOME to a folder you may write to"
        ) from error
    engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_S})

    @event.listens_for(engine, "connect")
    def _on_connect(connection: sqlite3.Connection, _record: object) -> None:
        # Transactions are ours: the driver would begin them late and DEFERRED, and lose the upgrade to a write lock.
        connection.isolation_level = None
        connection.execute(f"PRAGMA busy_timeout = {int(BUSY_TIMEOUT_S * 1000)}")
        # Changing to WAL needs the file alone and does not wait for it: ask only where it is not WAL yet.
        if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
            connection.execute("PRAGMA journal_mode = WAL")
        # A power cut may take back the last commits, never more: the part stands, its shard runs again and adopts it.
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA foreign_keys = ON")

    @event.listens_for(engine, "begin")
    def _on_begin(connection: Connection) -> None:
        read_only = connection.get_execution_options().get("nightmill_read_only", False)
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")

    return engine


def _postgres_engine(url: str) -> Engine:
    try:
        return create_engine(
            url,
            pool_pre_ping=True,
            pool_size=8,
            pool_timeout=30,
            pool_recycle=1800,
            connect_args={
                "connect_timeout": 5,
                "keepalives_idle": 10,
                "keepalives_interval": 5,
                "keepalives_count": 3,
                "options": "-c statement_timeout=30000 -c lock_timeout=10000"
                # Transactions wait for nothing but the database: whoever is silent in one stands still.
                f" -c idle_in_transaction_session_timeout={STALLED_S * 1000}",
            },
        )
    except ModuleNotFoundError as error:
        raise ConfigError(
            "DATABASE_URL asks for PostgreSQL, and its driver psycopg is not installed",
            hint="pip install 'psycopg[binary]', or unset DATABASE_URL to use SQLite",
        ) from error
