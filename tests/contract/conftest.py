"""A migrated PostgreSQL for the tests of the store: one database for all of them, emptied before each."""

from collections.abc import Iterator

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
