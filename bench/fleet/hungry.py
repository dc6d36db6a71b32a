"""Is the engine ever hungry? A slow object store, small shards, three jobs; real broker, database and S3 server.

`python -m bench.fleet.hungry [--latency 0.2] [--rows 3000] [--shard-rows 50] [--step 0.05] [--max-tokens 40]`

One worker with a scripted engine; every call to the object store takes `--latency` seconds longer. The engine notes its
steps. Hungry is the time of steps (and between steps) with fewer sequences than `--max-num-seqs` while rows that were
submitted had not entered the engine, over the wall time in which there were such rows. Prompts fit one step, so a row
enters with its first step. Measured from the first job's submission, and from the first step.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from deploy.native.faulty_s3 import FaultyS3
from deploy.native.folder import remove, scratch
from deploy.native.moto import Moto
from deploy.native.postgres import Postgres
from deploy.native.rabbitmq import Rabbitmq
from nightmill import Client

BUCKET = "hungry"
NIGHTMILL = str(Path(sys.executable).with_name("nightmill"))


@contextlib.contextmanager
def services(folder: Path, latency_s: float) -> Iterator[tuple[dict[str, str], Moto, FaultyS3]]:
    """Broker, database and a slow object store: the environment of a worker, and the fast store behind."""
    postgres, rabbitmq = Postgres(folder / "postgres"), Rabbitmq(folder / "rabbitmq")
    moto = Moto(folder / "moto")
    with contextlib.ExitStack() as stack:
        for server in (postgres, rabbitmq, moto):
            stack.callback(server.stop)
            server.start()
        proxy = stack.enter_context(FaultyS3(moto.endpoint.url, latency_s=latency_s))
        moto.endpoint.create_bucket(BUCKET)
        yield (
            moto.endpoint.env(BUCKET)
            | {
                "AWS_ENDPOINT_URL_S3": proxy.url,
                "DATABASE_URL": postgres.create_database("hungry"),
                "CELERY_BROKER_URL": rabbitmq.url(),
            },
            moto,
            proxy,
        )


def write_inputs(moto: Moto, rows: int) -> None:
    """Three files, without the latency."""
    client = moto.endpoint.client()
    for job in range(3):
        with tempfile.TemporaryFile() as file:
            pq.write_table(pa.table({"prompt": [f"{i % 900 + 10} {job} 7" for i in range(rows)]}), file)
            file.seek(0)
            client.put_object(Bucket=BUCKET, Key=f"in/{job}.parquet", Body=file)


def hungry_share(steps: np.ndarray, begin: float, total: int, slots: int) -> dict[str, float]:
    """Shares of the wall time from `begin` until the last row had entered.

    Args:
        steps: [N, 3] seconds at the begin, sequences, sequences at their first step.
        begin: Seconds.
        total: Rows of all jobs.
        slots: Sequences at once.
    """
    entered = np.cumsum(steps[:, 2])
    assert entered[-1] == total, (entered[-1], total)
    last = int(np.argmax(entered == total))
    starts = np.append(steps[: last + 1, 0], steps[last, 0])
    lengths = np.diff(starts)
    short = steps[: last + 1, 1] < slots
    idle = max(0.0, starts[0] - begin)
    wall = starts[-1] - min(begin, starts[0])
    return {"wall_s": wall, "hungry": (idle + lengths[short].sum()) / wall, "mean_batch": float(steps[:last, 1].mean())}


@click.command()
@click.option("--latency", default=0.2, show_default=True, help="Seconds added to each call of the object store.")
@click.option("--rows", default=3000, show_default=True, help="Of each of three jobs.")
@click.option("--shard-rows", default=50, show_default=True)
@click.option("--max-num-seqs", default=64, show_default=True)
@click.option("--step", "step_s", default=0.05, show_default=True, help="Seconds of an engine step.")
@click.option("--max-tokens", default=40, show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(
    latency: float,
    rows: int,
    shard_rows: int,
    max_num_seqs: int,
    step_s: float,
    max_tokens: int,
    json_path: Path | None,
) -> None:
    """Run it."""
    folder = scratch("nightmill-hungry")
    journal = folder / "steps.txt"
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        with services(folder, latency) as (environment, moto, proxy):
            write_inputs(moto, rows)
            os.environ |= environment | {"NIGHTMILL_HOME": str(folder / "home")}
            subprocess.run([NIGHTMILL, "migrate"], check=True)
            script = json.dumps({"step_s": step_s, "journal": str(journal)})
            words = [
                NIGHTMILL,
                "worker",
                "--fake-engine",
                script,
                "--max-num-seqs",
                str(max_num_seqs),
                "--model",
                "fake",
            ]
            with (folder / "worker.log").open("wb") as log, subprocess.Popen(words, stdout=log, stderr=log) as worker:
                try:
                    figures = measure(journal, rows, shard_rows, max_num_seqs, max_tokens)
                finally:
                    worker.terminate()
                    worker.wait(90)
            shards = 3 * -(-rows // shard_rows)
            figures["store_calls_per_shard"] = {
                method: round(len(proxy.seen(method)) / shards, 2)
                for method in ("GET", "HEAD", "PUT", "DELETE", "POST")
            }
    finally:
        remove(folder)
    click.echo(json.dumps(figures, indent=2))
    if json_path is not None:
        json_path.write_text(json.dumps(figures, indent=2) + "\n")


def measure(journal: Path, rows: int, shard_rows: int, slots: int, max_tokens: int) -> dict[str, object]:
    """Submit three jobs, wait for them, read the engine's journal."""
    while not journal.exists():  # the model is loaded
        time.sleep(0.1)
    with Client() as client:
        jobs, submitted = [], []
        for number in range(3):
            jobs.append(
                client.submit(
                    f"s3://{BUCKET}/in/{number}.parquet",
                    f"s3://{BUCKET}/out/{number}",
                    "fake",
                    shard_rows=shard_rows,
                    max_tokens=max_tokens,
                )
            )
            submitted.append(time.monotonic())
        for job in jobs:
            info = job.wait(600)
            assert info.rows.completed == rows, info
    steps = np.loadtxt(journal, ndmin=2)
    return {
        "shards": 3 * -(-rows // shard_rows),
        "rows_per_s_at_full_batch": round(slots / (max_tokens * float(np.median(np.diff(steps[:, 0])))), 1),
        "first_step_after_submit_s": round(float(steps[0, 0]) - submitted[0], 2),
        "from_submit": hungry_share(steps, submitted[0], 3 * rows, slots),
        "from_first_step": hungry_share(steps, float(steps[0, 0]), 3 * rows, slots),
    }


if __name__ == "__main__":
    main()
