"""How soon does an urgent shard start while bulk work saturates a worker? Real broker and database.

`python -m bench.fleet.urgent [--queue-type classic,quorum] [--jobs 20]`

One worker with a scripted engine, saturated by a low job. Small high jobs are submitted one after the other; measured
is submit → claim (a new job's created_at → started_at, both by the database's clock), before and after the broker was
killed and started again; `reconnect` are jobs submitted the moment the broker is back.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pyarrow as pa
import pyarrow.parquet as pq

from deploy.native.folder import remove, scratch
from deploy.native.postgres import Postgres
from deploy.native.rabbitmq import Rabbitmq
from nightmill.config import Settings
from nightmill.records import JobInfo, JobOptions, JobSpec, ModelSpec
from nightmill.ringing import ring
from nightmill.sampling import SamplingParams
from nightmill.states import Tier
from nightmill.store import Store
from nightmill.submit import submit_job

NIGHTMILL = str(Path(sys.executable).with_name("nightmill"))
SCRIPT = {"step_s": 0.02}


@dataclass
class Site:
    """One measurement's servers and worker."""

    folder: Path
    settings: Settings
    store: Store
    rabbitmq: Rabbitmq
    log: Path

    def submit(self, name: str, rows: int, tier: Tier, max_tokens: int) -> JobInfo:
        path = self.folder / f"{name}.parquet"
        pq.write_table(pa.table({"prompt": [f"{10 + i % 900} 7" for i in range(rows)]}), path, row_group_size=500)
        spec = JobSpec(
            inputs=(str(path),),
            output=str(self.folder / f"{name}-out"),
            model=ModelSpec(model="fake"),
            sampling=SamplingParams(max_tokens=max_tokens),
        )
        job = submit_job(self.store, spec, JobOptions(tier=tier, shard_rows=500))
        ring(self.store, self.settings)
        return job

    def urgent_ms(self, label: str, count: int) -> dict[str, float]:
        """Latencies of `count` urgent jobs, one after the other."""
        found = []
        for number in range(count):
            job = self.submit(f"{label}-{number}", 8, Tier.HIGH, 4)
            while (info := self.store.job(job.job_id)).started_at is None:
                time.sleep(0.01)
            found.append((info.started_at - info.created_at).total_seconds() * 1000)
            time.sleep(0.3)
        return {"p50": round(statistics.median(found), 1), "max": round(max(found), 1)}


@contextlib.contextmanager
def site(queue_type: str) -> Iterator[Site]:
    folder = scratch("nightmill-urgent")
    postgres, rabbitmq = Postgres(folder / "postgres"), Rabbitmq(folder / "rabbitmq")
    with contextlib.ExitStack() as stack:
        stack.callback(remove, folder)
        for server in (postgres, rabbitmq):
            stack.callback(server.stop)
            server.start()
        environment = {
            "DATABASE_URL": postgres.create_database("urgent"),
            "CELERY_BROKER_URL": rabbitmq.url(),
            "NIGHTMILL_QUEUE_TYPE": queue_type,
            "NIGHTMILL_HOME": str(folder / "home"),
            "NIGHTMILL_LOG_LEVEL": "info",
        }
        settings = Settings.from_env({"HOME": str(folder), **environment})
        store = Store(settings.database_url)
        stack.callback(store.close)
        store.migrate()
        log = folder / "worker.log"
        command = [NIGHTMILL, "worker", "--fake-engine", json.dumps(SCRIPT), "--max-num-seqs", "64"]
        with log.open("wb") as out:
            worker = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **environment})
        stack.callback(worker.wait)
        stack.callback(worker.kill)
        yield Site(folder, settings, store, rabbitmq, log)


def measure(queue_type: str, count: int) -> dict[str, dict[str, float]]:
    with site(queue_type) as at:
        bulk = at.submit("bulk", 20_000, Tier.LOW, 200)
        while at.store.job(bulk.job_id).rows_running < 60:
            time.sleep(0.1)
        found = {"before": at.urgent_ms("before", count)}
        heard = at.log.read_text().count("listening to")
        at.rabbitmq.restart()
        found["reconnect"] = at.urgent_ms("reconnect", 3)
        while at.log.read_text().count("listening to") == heard:
            time.sleep(0.1)
        found["after"] = at.urgent_ms("after", count)
        if at.store.job(bulk.job_id).rows.completed == 20_000:
            raise click.ClickException("the bulk job ended before the measurement: its figures are void")
        return found


@click.command()
@click.option("--queue-type", default="classic,quorum", show_default=True)
@click.option("--jobs", type=click.IntRange(1), default=20, show_default=True)
def main(queue_type: str, jobs: int) -> None:
    click.echo(json.dumps({kind: measure(kind, jobs) for kind in queue_type.split(",")}, indent=2))


if __name__ == "__main__":
    main()
