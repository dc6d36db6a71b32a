"""The store's random histories, on every database."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from tests.contract.store_machine import StoreMachine

from nightmill.states import SHARD_MOVES, TERMINAL_SHARD, ShardState
from nightmill.store import Store


class SqliteMachine(StoreMachine):
    _store: ClassVar[Store | None] = None
    _folder: ClassVar[Path | None] = None

    def open_store(self) -> Store:
        if SqliteMachine._store is None:
            SqliteMachine._folder = Path(tempfile.mkdtemp())
            SqliteMachine._store = Store(f"sqlite:///{SqliteMachine._folder / 'store.db'}")
            SqliteMachine._store.migrate()
        return SqliteMachine._store


class PostgresMachine(StoreMachine):
    store_url: ClassVar[str] = ""
    _store: ClassVar[Store | None] = None

    def open_store(self) -> Store:
        if PostgresMachine._store is None:
            PostgresMachine._store = Store(self.store_url)
        return PostgresMachine._store


@pytest.fixture(autouse=True, scope="module")
def _close_stores() -> Iterator[None]:
    yield
    for machine in (SqliteMachine, PostgresMachine):
        if machine._store is not None:
            machine._store.close()
            machine._store = None
    if SqliteMachine._folder is not None:
        shutil.rmtree(SqliteMachine._folder)


_slow = [HealthCheck.too_slow]
TestSqliteMachine = SqliteMachine.TestCase
TestSqliteMachine.settings = settings(
    max_examples=50, stateful_step_count=40, deadline=None, suppress_health_check=_slow
)


@pytest.mark.usefixtures("_postgres_machine_url")
class TestPostgresMachine(PostgresMachine.TestCase):  # type: ignore[misc, name-defined]
    settings = settings(max_examples=12, stateful_step_count=40, deadline=None, suppress_health_check=_slow)


@pytest.fixture
def _postgres_machine_url(postgres_store_url: str) -> None:
    PostgresMachine.store_url = postgres_store_url


def test_every_move_from_an_open_to_a_terminal_state_goes_through_a_lease() -> None:
    for state, moves in SHARD_MOVES.items():
        if moves & TERMINAL_SHARD and state not in TERMINAL_SHARD:
            assert state is ShardState.LEASED
