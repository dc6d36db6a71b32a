"""The store on every database it knows. PostgreSQL: one migrated database for all tests, emptied before each."""

import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from sqlalchemy import text

from deploy.native.postgres import Postgres
from nightmill.store import Store


@pytest.fixture(scope="session")
def _migrated_postgres(postgres_server: Postgres) -> Iterator[Store]:
    if not postgres_server.running:
        postgres_server.start()
    store = Store(postgres_server.create_database("store_contract"))
    store.migrate()
    yield store
    store.close()


@pytest.fixture
def postgres_store_url(_migrated_postgres: Store, postgres_server: Postgres) -> str:
    if not postgres_server.running:
        postgres_server.start()
    _migrated_postgres._database.write(lambda c: c.execute(text("TRUNCATE jobs RESTART IDENTITY CASCADE")))
    return _migrated_postgres._database.url.render_as_string(hide_password=False)


BACKENDS = ("sqlite", "postgres")


@cache
def _migrated_sqlite() -> bytes:
    """A migrated, empty database: one migration for all tests."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "store.db")
        store = Store(f"sqlite:///{path}")
        store.migrate()
        store.close()
        return path.read_bytes()


@pytest.fixture(params=BACKENDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "sqlite":
        path = tmp_path / "store.db"
        path.write_bytes(_migrated_sqlite())
        store = Store(f"sqlite:///{path}", rings=True)
    else:
        store = Store(request.getfixturevalue("postgres_store_url"))
    yield store
    store.close()
