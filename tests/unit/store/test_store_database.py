import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError, OperationalError

from nightmill.errors import ConfigError, StorageError
from nightmill.store import Store
from nightmill.store import database as module
from nightmill.store.database import Database, can_retry


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(f"sqlite:///{tmp_path / 'store.db'}")
    database.write(lambda c: c.execute(text("CREATE TABLE t (x INTEGER)")))
    yield database
    database.close()


def count(connection: Connection) -> int:
    number: int = connection.execute(text("SELECT count(*) FROM t")).scalar_one()
    return number


def busy(database: Database) -> DBAPIError:
    """A real "database is locked": another writer is in, and we do not wait."""
    path = str(database.url.database)
    with closing(sqlite3.connect(path)) as holder, closing(sqlite3.connect(path, timeout=0)) as other:
        holder.execute("BEGIN IMMEDIATE")
        with pytest.raises(sqlite3.OperationalError) as caught:
            other.execute("BEGIN IMMEDIATE")
        holder.rollback()
    return OperationalError("BEGIN IMMEDIATE", None, caught.value)


def test_every_connection_is_as_we_want_it(database: Database) -> None:
    pragmas = {"journal_mode": "wal", "busy_timeout": 30000, "foreign_keys": 1, "synchronous": 1}
    for read in (database.read, database.write):
        found = {name: read(lambda c, name=name: c.execute(text(f"PRAGMA {name}")).scalar()) for name in pragmas}
        assert found == pragmas


def test_a_lock_runs_the_whole_transaction_again(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "sleep", lambda _: None)
    errors = [busy(database), busy(database)]

    def insert(connection: Connection) -> str:
        connection.execute(text("INSERT INTO t VALUES (1)"))
        if errors:
            raise errors.pop()
        return "done"

    assert database.write(insert) == "done"
    assert database.read(count) == 1


def test_a_lock_that_does_not_end_is_told(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "sleep", lambda _: None)
    error = busy(database)

    def fail(_: Connection) -> None:
        raise error

    with pytest.raises(StorageError, match="database is locked"):
        database.write(fail)


def test_a_bug_is_neither_retried_nor_hidden(database: Database) -> None:
    calls = []

    def fail(_: Connection) -> None:
        calls.append(1)
        raise KeyError("x")

    with pytest.raises(KeyError):
        database.write(fail)
    assert calls == [1]


def test_a_writer_holds_the_lock_from_its_begin(database: Database) -> None:
    """Else two read the same state and the second fails in the middle."""

    def look(connection: Connection) -> bool:
        with closing(sqlite3.connect(str(database.url.database), timeout=0)) as other:
            try:
                other.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                return False
            other.rollback()
        return True

    assert not database.write(look)
    assert database.read(look)


class PostgresError(Exception):
    def __init__(self, sqlstate: str | None) -> None:
        self.sqlstate = sqlstate


@pytest.mark.parametrize(
    ("sqlstate", "expected"),
    [
        ("40001", True),
        ("40P01", True),
        ("57P01", True),
        ("08006", True),
        ("55P03", True),
        ("23505", False),
        ("42601", False),
    ],
)
def test_what_postgres_may_heal(sqlstate: str, expected: bool) -> None:
    assert can_retry(DBAPIError("SELECT 1", None, PostgresError(sqlstate))) == expected


def test_a_server_that_is_away_may_come_back() -> None:
    assert can_retry(OperationalError("SELECT 1", None, PostgresError(None)))


def test_a_file_that_is_no_database_is_told(tmp_path: Path) -> None:
    (tmp_path / "store.db").write_text("not a database" * 100)
    store = Store(f"sqlite:///{tmp_path / 'store.db'}")
    with pytest.raises(StorageError, match="damaged"):
        store.migrate()
    store.close()


def test_a_place_that_cannot_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="folder of the job store"):
        Store(f"sqlite:///{tmp_path / 'file' / 'store.db'}")


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:"])
def test_a_store_in_memory_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="file"):
        Store(url)


@pytest.mark.parametrize(
    "place",
    ["a:p@ss:secret@h:5/x", "a:secret@ss@h/x", "u:secret@h:port/x", "u:p/secret@h:99:1/x"],
)
def test_a_url_that_cannot_be_read_is_told_without_its_password(place: str) -> None:
    with pytest.raises(ConfigError, match="told apart") as caught:
        Database(f"postgresql+psycopg://{place}")
    assert "secret" not in str(caught.value)


def test_a_password_written_as_the_hint_says_is_taken() -> None:
    database = Database("postgresql+psycopg://u:p%40s%2Fs%3Aw%25@h:5432/x")
    assert database.url.password == "p@s/s:w%"
    database.close()


def test_an_option_that_libpq_does_not_know_is_no_bug() -> None:
    database = Database("postgresql+psycopg://u@127.0.0.1:1/x?nonsense=1")
    with pytest.raises(ConfigError, match='DATABASE_URL: invalid connection option "nonsense"'):
        database.read(lambda connection: None)
    database.close()
