import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from sqlalchemy import text

from nightmill.cli.main import cli
from nightmill.schema import REVISION
from nightmill.store import Store, migrate
from nightmill.store.database import Database


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'store.db'}"


def run(url: str, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["migrate", *arguments], env={"DATABASE_URL": url, "NIGHTMILL_HOME": ""})


def test_an_empty_store_is_filled_and_then_left_alone(url: str) -> None:
    checked = run(url, "--check")
    assert (checked.exit_code, f"empty → {REVISION}" in checked.stderr) == (1, True)
    assert run(url, "--check").exit_code == 1, "a check changes nothing"
    migrated = run(url)
    assert (migrated.exit_code, f"migrated: empty → {REVISION}" in migrated.stderr) == (0, True)
    assert run(url, "--check").exit_code == 0
    assert "nothing to do" in run(url).stderr


def test_an_older_store_says_from_where_to_where(url: str) -> None:
    database = Database(url)
    migrate.migrate(database, "0001")
    database.close()
    assert json.loads(run(url, "--check", "--json").stdout) == {"from": "0001", "to": "0001", "newest": REVISION}
    assert json.loads(run(url, "--json").stdout) == {"from": "0001", "to": REVISION, "newest": REVISION}


def test_a_newer_store_is_refused(url: str) -> None:
    store = Store(url)
    store.migrate()
    store._database.write(lambda c: c.execute(text("UPDATE alembic_version SET version_num = '9999'")))
    store.close()
    assert run(url, "--check").exit_code == 1
    refused = run(url)
    assert refused.exit_code == 2
    assert "newer nightmill" in refused.stderr
