"""One chaos run: a system under load is broken by a seed's plan for a while, mends itself, and is judged."""

import io
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from tests.chaos.ledger import CheckpointLedger
from tests.chaos.load import BULK_TOKENS, Load
from tests.chaos.plan import Target, draw_events
from tests.chaos.system import System
from tests.chaos.verdict import Left, examine, load_manifest, recompute_limit, recomputed_rows
from tests.chaos.workers import make_janitor, make_worker

from deploy.native.ceph import Ceph
from deploy.native.faulty_s3 import FaultyS3
from deploy.native.postgres import Postgres
from deploy.native.rabbitmq import Rabbitmq
from nightmill.client import Client
from nightmill.states import JobStatus

NUM_WORKERS = 3
MEND_S = 240.0  # after the last fault everything is to end within this


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """What to do to which servers. The broker is the run's own: it is wiped."""

    seed: int
    duration_s: float
    rows: int
    folder: Path  # for logs and journals
    postgres: Postgres
    rabbitmq: Rabbitmq
    ceph: Ceph
    step_s: float = 0.02  # of an engine: three of them then answer 600 rows a second at most


@dataclass(slots=True)
class Result:
    """What is written of a run."""

    seed: int
    seconds: float
    rows: int
    distinct: int
    missing: int
    doubled: int
    recomputed: int
    recompute_limit: int
    orphans: int
    max_attempts: int
    kills: dict[str, int]
    urgent_ms: dict[str, float | int]
    worker_exits: list[int] = field(default_factory=list)  # that nobody had asked for
    violations: list[str] = field(default_factory=list)


def run_drill(drill: Drill) -> Result:
    """Run it and judge it. While it runs, this process's environment says how to reach the store: through the proxy.

    Raises:
        ServiceError: a server did not come back, which is no verdict on nightmill.
    """
    database = f"chaos_{os.getpid()}_{drill.seed}"
    bucket = f"chaos-{os.getpid()}-{drill.seed}"
    drill.folder.mkdir(parents=True, exist_ok=True)
    drill.ceph.endpoint.create_bucket(bucket)
    ledger = CheckpointLedger()
    with FaultyS3(drill.ceph.endpoint.url, seed=drill.seed, observe=ledger.observe) as proxy:
        env = drill.ceph.endpoint.env() | {
            "AWS_ENDPOINT_URL_S3": proxy.url,
            "DATABASE_URL": drill.postgres.create_database(database),
            "CELERY_BROKER_URL": drill.rabbitmq.url(),
        }
        workers = [make_worker(number, drill.folder, env, drill.step_s) for number in range(NUM_WORKERS)]
        system = System(
            postgres=drill.postgres,
            rabbitmq=drill.rabbitmq,
            ceph=drill.ceph,
            proxy=proxy,
            workers=workers,
            janitor=make_janitor(drill.folder, env),
            seed=drill.seed,
        )
        with _environment(env), Client() as client:
            load = Load(client, drill.ceph.endpoint, bucket, f"seed-{drill.seed}")
            try:
                began = time.monotonic()
                unended = _break_and_mend(drill, system, load)
                seconds = time.monotonic() - began
            finally:
                load.stop_urgent()
                system.close()
            return _judge(drill, system, load, ledger, seconds, unended)


def _break_and_mend(drill: Drill, system: System, load: Load) -> list[str]:
    """The faults of the plan, then peace until every job has ended; returns those that have not."""
    system.tend()
    load.submit_bulk(drill.rows)
    load.start_urgent()
    began = time.monotonic()
    events = draw_events(drill.seed, drill.duration_s)
    while time.monotonic() - began < drill.duration_s or events or not system.quiet:
        system.tend()
        while events and events[0].at_s <= time.monotonic() - began:
            system.do(events.pop(0))
        time.sleep(0.1)
    load.stop_urgent()
    open_jobs = list(load.jobs)
    deadline = time.monotonic() + MEND_S
    while open_jobs and time.monotonic() < deadline:
        system.tend()
        open_jobs = [name for name in open_jobs if not load.jobs[name][0].done]
        time.sleep(0.3)
    return open_jobs


def _judge(
    drill: Drill, system: System, load: Load, ledger: CheckpointLedger, seconds: float, unended: list[str]
) -> Result:
    ended = {name: job for name, job in load.jobs.items() if name not in unended}
    findings = examine({name: (expected, _read(load, name)) for name, (_, expected) in ended.items()})
    violations = [f"{name} has not ended {MEND_S:.0f} s after the last fault" for name in unended] + findings.violations
    infos = {name: job.info() for name, (job, _) in ended.items()}
    for name, info in infos.items():
        if info.status is not JobStatus.COMPLETED or info.rows.completed != info.rows.total:
            violations.append(f"{name} is {info.status}, with {info.rows}")
    needed = sum(len(expected.answers) * expected.max_tokens for _, expected in ended.values())
    recomputed = recomputed_rows(sorted(drill.folder.glob("journal-*")), needed, BULK_TOKENS)
    limit = recompute_limit({target.value: system.kills[target] for target in Target}, system.held)
    if recomputed > limit and not unended:
        violations.append(f"{recomputed} rows were computed in vain, of at most {limit}")
    attempts = {
        (job.id, shard.range.index): shard.attempt
        for job, _ in ended.values()
        for shard in load.client.store.shard_results(job.id)
    }
    if again := ledger.durable_rows_computed_again(attempts):
        violations.append(f"{again} rows were computed again although they were durable")
    waits = [
        (info.started_at.timestamp() - load.asked_at[name]) * 1000 for name, info in infos.items() if info.started_at
    ]
    return Result(
        seed=drill.seed,
        seconds=round(seconds, 1),
        rows=findings.rows,
        distinct=findings.distinct,
        missing=findings.missing,
        doubled=findings.doubled,
        recomputed=recomputed,
        recompute_limit=limit,
        orphans=findings.orphans,
        max_attempts=max(attempts.values(), default=0),
        kills={target.value: system.kills[target] for target in Target},
        urgent_ms={"p50": round(statistics.median(waits[1:] or [0])), "max": round(max(waits[1:], default=0))},
        worker_exits=[code for worker in system.workers for code in worker.exits],
        violations=violations,
    )


def _read(load: Load, name: str) -> Left:
    """A job's output, straight from the store."""
    client = load.store.client()
    root = f"{load.prefix}/{name}-out/"
    try:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=load.bucket, Prefix=root)
        names = [entry["Key"].removeprefix(root) for page in pages for entry in page.get("Contents", [])]

        def get(path: str) -> bytes:
            with client.get_object(Bucket=load.bucket, Key=root + path)["Body"] as body:
                return bytes(body.read())

        manifest: dict[str, Any] = load_manifest(get("_manifest.json")) if "_manifest.json" in names else {}
        visible = [path for path in names if not path.startswith(("_", "."))]
        parts = {path: pq.read_table(io.BytesIO(get(path))) for path in visible if path.endswith(".parquet")}
    finally:
        client.close()
    return Left(names, manifest, parts)


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """The client's storage reads the process's environment."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
