import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect, text

import nightmill
from nightmill.errors import ConfigError
from nightmill.schema import REVISION, metadata
from nightmill.states import JobStatus, ShardState
from nightmill.store import Store, migrate
from nightmill.store.database import Database

DIALECTS = ("sqlite", "postgres")
MakeDatabase = Callable[[str], Database]


@pytest.fixture(params=DIALECTS)
def make_database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeDatabase]:
    """Empty databases of one dialect, by name."""
    made: list[Database] = []

    def make(name: str) -> Database:
        if request.param == "sqlite":
            made.append(Database(f"sqlite:///{tmp_path / name}.db"))
        else:
            made.append(Database(request.getfixturevalue("postgres_database")()))
        return made[-1]

    yield make
    for database in made:
        database.close()


@pytest.fixture
def database(make_database: MakeDatabase) -> Database:
    return make_database("store")


def alembic_config(connection: Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", str(migrate.migrations_dir()))
    config.attributes["connection"] = connection
    return config


def _condition(index: Any) -> str | None:
    options = index.get("dialect_options", {})
    condition = options.get("sqlite_where", options.get("postgresql_where"))
    return None if condition is None else str(condition)


def constraints(connection: Connection) -> dict[str, Any]:
    """What alembic does not compare: CHECKs, foreign keys with actions, defaults, conditions of indexes, by table."""
    inspector = inspect(connection)
    return {
        table: {
            "checks": sorted((str(c["name"]), c["sqltext"]) for c in inspector.get_check_constraints(table)),
            "foreign": sorted((str(f["name"]), str(f["options"])) for f in inspector.get_foreign_keys(table)),
            "primary": inspector.get_pk_constraint(table),
            "defaults": {c["name"]: c["default"] for c in inspector.get_columns(table)},
            "indexes": sorted((str(i["name"]), i["column_names"], _condition(i)) for i in inspector.get_indexes(table)),
        }
        for table in metadata.tables
    }


def test_upgrade_from_empty_equals_the_models(database: Database, make_database: MakeDatabase) -> None:
    migrate.migrate(database)
    options = {"compare_type": True, "compare_server_default": True}
    difference = database.read(lambda c: compare_metadata(MigrationContext.configure(c, opts=options), metadata))
    assert difference == []

    models = make_database("models")
    models.write(metadata.create_all)
    assert database.read(constraints) == models.read(constraints)


def test_every_state_is_in_its_check(database: Database) -> None:
    migrate.migrate(database)
    checks = database.read(constraints)
    assert all(f"'{status}'" in dict(checks["jobs"]["checks"])["ck_jobs_status"] for status in JobStatus)
    assert all(f"'{state}'" in dict(checks["shards"]["checks"])["ck_shards_state"] for state in ShardState)


def test_the_revision_in_the_schema_is_the_head() -> None:
    config = Config()
    config.set_main_option("script_location", str(migrate.migrations_dir()))
    assert ScriptDirectory.from_config(config).get_heads() == [REVISION]


def test_up_down_up(database: Database) -> None:
    migrate.migrate(database)
    first = database.read(constraints)
    database.write(lambda c: command.downgrade(alembic_config(c), "base"))
    assert database.read(lambda c: inspect(c).get_table_names()) == ["alembic_version"]
    migrate.migrate(database)
    assert database.read(constraints) == first


def test_an_older_store_keeps_everything(database: Database) -> None:
    """Every row of 0001 is there after the upgrade and after the way back; what is new gets its default."""
    migrate.migrate(database, "0001")
    database.write(_fill_0001)
    before = database.read(_rows)
    assert [len(rows) for rows in before.values()] == [2, 2, 4, 1]
    migrate.migrate(database)
    after = database.read(_rows)
    jobs = {"generation": 0, "source_schema": None, "num_refusals": 0}
    new = {"jobs": jobs, "shards": {"generation": 0, "num_rings": 0}}
    for table, rows in before.items():
        if (table, database.is_sqlite) != ("outbox", True):  # emptied: nobody rings there
            assert after[table] == [row | new.get(table, {}) for row in rows]
    database.write(lambda c: command.downgrade(alembic_config(c), "0001"))
    back = database.read(_rows)
    assert {name: back[name] for name in ("jobs", "sources", "shards")} == {
        name: before[name] for name in ("jobs", "sources", "shards")
    }


def _fill_0001(connection: Connection) -> None:
    job = (
        "INSERT INTO jobs (job_id, status, tier, spec, spec_digest, options, output, max_failures, created_at) VALUES"
        " (:id, :status, 'low', '{}', 'd', '{}', :output, 5, '2026-11-29 12:00:00.000')"
    )
    source = "INSERT INTO sources (job_id, position, uri, num_rows, size_bytes) VALUES (:id, 0, '/in', 20, 9)"
    shard = (
        "INSERT INTO shards (job_id, shard_index, source_file, row_start, row_end, state, worker_id, lease_expires_at,"
        " part_uri, part_etag, rows_completed) VALUES (:id, :i, '/in', 0, 10, :state, :worker, :expires, :part, :part,"
        " :rows)"
    )
    lease = {"worker": "w1", "expires": "2026-11-29 12:00:30.000", "part": None, "rows": 3}
    done = {"worker": None, "expires": None, "part": "/p", "rows": 10}
    for job_id, status in (("job-a", "in_progress"), ("job-b", "completed")):
        connection.execute(text(job), {"id": job_id, "status": status, "output": f"/{job_id}"})
        connection.execute(text(source), {"id": job_id})
        first = ("leased", lease) if status == "in_progress" else ("committed", done)
        for i, (state, values) in enumerate((first, ("committed", done))):
            connection.execute(text(shard), {"id": job_id, "i": i, "state": state, **values})
    ring = "INSERT INTO outbox (shard_id, tier, created_at) SELECT min(shard_id), 'low', '2026-11-29' FROM shards"
    connection.execute(text(ring))


def _rows(connection: Connection) -> dict[str, list[dict[str, Any]]]:
    tables = {"jobs": "job_id", "sources": "job_id", "shards": "shard_id", "outbox": "outbox_id"}
    return {
        table: [dict(row) for row in connection.execute(text(f"SELECT * FROM {table} ORDER BY {key}")).mappings()]
        for table, key in tables.items()
    }


def test_a_failed_migration_leaves_nothing(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    def upgrade_and_die(config: Config, revision: str) -> None:
        original(config, revision)
        raise RuntimeError("killed here")

    original = command.upgrade
    monkeypatch.setattr(command, "upgrade", upgrade_and_die)
    with pytest.raises(RuntimeError):
        migrate.migrate(database)
    assert database.read(lambda c: inspect(c).get_table_names()) == []


def test_a_newer_database_is_refused(database: Database) -> None:
    migrate.migrate(database)
    database.write(lambda c: c.execute(text("UPDATE alembic_version SET version_num = '9999'")))
    with pytest.raises(ConfigError, match=r"9999[^\n]*\n.*newer"):
        migrate.migrate(database)


def test_many_may_migrate_at_once(database: Database) -> None:
    """SQLite: a fresh file, WAL not set yet: the worst moment to come second."""
    url = database.url.render_as_string(hide_password=False)
    start = threading.Barrier(8)
    failures: list[BaseException] = []

    def work() -> None:
        store = Store(url)
        try:
            start.wait()
            store.migrate()
            assert store.jobs() == []
        except BaseException as error:  # noqa: BLE001 - shown by the assertion below
            failures.append(error)
        finally:
            store.close()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_current_database_is_opened_without_alembic_torch_or_pyarrow(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    store = Store(url)
    store.migrate()
    store.close()
    script = (
        "import sys; from nightmill.store import Store; s = Store(sys.argv[1]); s.migrate(); s.jobs();"
        "heavy = {'alembic', 'pyarrow', 'torch', 'numpy', 'boto3'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script, url], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_migrations_are_found_in_an_installed_package(tmp_path: Path) -> None:
    """The wheel's layout: migrations inside the package, imported from a zip-free copy with no checkout around."""
    package = Path(nightmill.__file__).parent
    installed = tmp_path / "site" / "nightmill"
    shutil.copytree(package, installed, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(package.parents[1] / "migrations", installed / "migrations", dirs_exist_ok=True)
    script = (
        "import sys, nightmill; from nightmill.store import Store, migrate; s = Store(sys.argv[1]); s.migrate();"
        "assert s.jobs() == []; sys.stdout.write(str(migrate.migrations_dir()))"
    )
    environ = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    command_line = [sys.executable, "-c", script, f"sqlite:///{tmp_path / 'store.db'}"]
    done = subprocess.run(command_line, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", str(installed / "migrations"))
