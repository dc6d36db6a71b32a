"""A database, a broker if wanted, workers with a scripted engine, rows on a disk or on S3: where figures are taken."""

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

from deploy.native.faulty_s3 import FaultyS3
from deploy.native.folder import remove, scratch
from deploy.native.moto import Moto
from deploy.native.postgres import Postgres
from deploy.native.rabbitmq import Rabbitmq
from nightmill.config import Settings
from nightmill.store import Store

NIGHTMILL = str(Path(sys.executable).with_name("nightmill"))
WRITE_ROWS = 50_000
BUCKET = "figures"


@dataclass
class Site:
    """One measurement's servers."""

    folder: Path
    environment: dict[str, str]
    settings: Settings
    store: Store
    moto: Moto | None = None  # None: inputs and outputs lie in `folder`

    def write(self, name: str, rows: int, row_group_size: int = 2000) -> str:
        """Prompts, written in pieces; where they lie."""
        path = self.folder / f"{name}.parquet"
        with pq.ParquetWriter(path, pa.schema([("prompt", pa.string())])) as writer:
            for start in range(0, rows, WRITE_ROWS):
                prompts = [f"{i % 900 + 10} {i % 7 + 1}" for i in range(start, min(rows, start + WRITE_ROWS))]
                writer.write_table(pa.table({"prompt": prompts}), row_group_size=row_group_size)
        if self.moto is None:
            return str(path)
        self.moto.endpoint.client().upload_file(str(path), BUCKET, path.name)
        return f"s3://{BUCKET}/{path.name}"

    def output(self, name: str) -> str:
        """A folder for answers."""
        return str(self.folder / f"{name}-out") if self.moto is None else f"s3://{BUCKET}/{name}-out"

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
def site(*, broker: bool, s3_latency_s: float | None = None) -> Iterator[Site]:
    """Start the servers; stopped and removed on leaving.

    Args:
        broker: With RabbitMQ.
        s3_latency_s: Inputs and outputs on S3 (moto), each call so many seconds longer; None: on the disk.
    """
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
        moto = None
        if s3_latency_s is not None:
            moto = Moto(folder / "moto")
            stack.callback(moto.stop)
            moto.start()
            moto.endpoint.create_bucket(BUCKET)
            proxy = stack.enter_context(FaultyS3(moto.endpoint.url, latency_s=s3_latency_s))
            ours |= moto.endpoint.env(BUCKET) | {"AWS_ENDPOINT_URL_S3": proxy.url}
            os.environ |= ours  # this process submits
        settings = Settings.from_env({"HOME": str(folder), **ours})
        store = Store(settings.database_url)
        stack.callback(store.close)
        store.migrate()
        inherited = {name: value for name, value in os.environ.items() if name != "CELERY_BROKER_URL"}
        yield Site(folder, {**inherited, **ours, "OMP_NUM_THREADS": "1"}, settings, store, moto)
