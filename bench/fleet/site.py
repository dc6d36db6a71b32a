"""A database, a broker if wanted, and workers with a scripted engine, on local folders: where figures are taken."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from deploy.native.folder import remove, scratch
from deploy.native.postgres import Postgres
from deploy.native.rabbitmq import Rabbitmq
from nightmill.config import Settings
from nightmill.store import Store

NIGHTMILL = str(Path(sys.executable).with_name("nightmill"))
WRITE_ROWS = 50_000


@dataclass
class Site:
    """One measurement's servers."""

    folder: Path
    environment: dict[str, str]
    settings: Settings
    store: Store

    def write(self, name: str, rows: int) -> Path:
        """Prompts, written in pieces; the file."""
        path = self.folder / f"{name}.parquet"
        with pq.ParquetWriter(path, pa.schema([("prompt", pa.string())])) as writer:
            for start in range(0, rows, WRITE_ROWS):
                prompts = [f"{i % 900 + 10} {i % 7 + 1}" for i in range(start, min(rows, start + WRITE_ROWS))]
                writer.write_table(pa.table({"prompt": prompts}), row_group_size=2000)
        return path

    @contextlib.contextmanager
    def worker(self, script: dict[str, object], *flags: str) -> Iterator[subprocess.Popen[bytes]]:
        """A worker; killed on leaving if it still runs."""
        words = [NIGHTMILL, "worker", "--fake-engine", json.dumps(script), *flags]
        with (self.folder / "worker.log").open("ab") as log:
            process = subprocess.Popen(words, stdout=log, stderr=log, env=self.environment)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def site(*, broker: bool) -> Iterator[Site]:
    """Start the servers; stopped and removed on leaving."""
    folder = scratch("nightmill-figures")
    postgres, rabbitmq = Postgres(folder / "postgres"), Rabbitmq(folder / "rabbitmq")
    with contextlib.ExitStack() as stack:
        stack.callback(remove, folder)
        stack.callback(postgres.stop)
        postgres.start()
        if broker:
            stack.callback(rabbitmq.stop)
            rabbitmq.start()
        ours = {"DATABASE_URL": postgres.create_database("figures"), "NIGHTMILL_HOME": str(folder / "home")}
        if broker:
            ours["CELERY_BROKER_URL"] = rabbitmq.url()
        settings = Settings.from_env({"HOME": str(folder), **ours})
        store = Store(settings.database_url)
        stack.callback(store.close)
        store.migrate()
        inherited = {name: value for name, value in os.environ.items() if name != "CELERY_BROKER_URL"}
        yield Site(folder, {**inherited, **ours, "OMP_NUM_THREADS": "1"}, settings, store)
