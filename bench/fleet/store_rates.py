"""What the database of a fleet takes: submit of many shards, rings, claims, commits, progress writes.

`python -m bench.fleet.store_rates [--shards 10000] [--workers 8] [--seconds 5]`

PostgreSQL with fsync, one row a shard. A progress write is a heartbeat: it renews 64 leases and writes their counters,
in one statement; each worker is a process.
"""

import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import click
from bench.fleet.site import Site, site

from nightmill.records import JobOptions, JobSpec, ModelSpec, RowCounts, ShardProgress, ShardResult, TokenCounts
from nightmill.ringing import ring
from nightmill.store import Store
from nightmill.submit import submit_job

HELD = 64  # leases of a worker
Result = TypeVar("Result")


def timed(call: Callable[[], Result]) -> tuple[Result, float]:
    """Its result, and seconds."""
    begun = time.perf_counter()
    result = call()
    return result, time.perf_counter() - begun


def beat(url: str, worker_id: str, leases: dict[int, int], seconds: float) -> list[float]:
    """Seconds of each progress write of one worker."""
    store = Store(url)
    progress = {shard: ShardProgress(attempt=attempt, rows_running=1) for shard, attempt in leases.items()}
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        progress = {shard: replace(one, tokens=TokenCounts(completion=len(taken))) for shard, one in progress.items()}
        taken.append(timed(lambda: store.heartbeat(worker_id, progress))[1])  # noqa: B023
    store.close()
    return taken


def measure(at: Site, shards: int, workers: int, seconds: float) -> dict[str, object]:
    """All figures."""
    spec = JobSpec(inputs=(at.write("in", shards),), output=str(at.folder / "out"), model=ModelSpec(model="fake"))
    job, submit_s = timed(lambda: submit_job(at.store, spec, JobOptions(shard_rows=1)))
    _, ring_s = timed(lambda: ring(at.store, at.settings))
    status_s = statistics.median(timed(lambda: at.store.job(job.job_id))[1] for _ in range(9))
    held: list[dict[int, int]] = [{} for _ in range(workers)]
    claims, commits = [], []
    shard_ids = at.store.available_shards(HELD * workers + 100, job.job_id)
    for number, shard_id in enumerate(shard_ids):
        owner = f"worker-{number % workers}"
        lease, claim_s = timed(lambda: at.store.claim(shard_id, owner, 600.0))  # noqa: B023
        assert lease is not None
        claims.append(claim_s)
        if number < HELD * workers:
            held[number % workers][shard_id] = lease.attempt
            continue
        result = ShardResult(
            rows=RowCounts(total=1, completed=1, failed=0, cancelled=0),
            tokens=TokenCounts(prompt=2, completion=1),
            error_codes={},
            part_uri="/out/part",
            part_bytes=1,
            part_etag="1",
        )
        commits.append(timed(lambda: at.store.commit_shard(lease, result))[1])  # noqa: B023
    url = at.settings.database_url
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.starmap(beat, [(url, f"worker-{i}", held[i], 0.1) for i in range(workers)], chunksize=1)  # warm
        beats = pool.starmap(beat, [(url, f"worker-{i}", held[i], seconds) for i in range(workers)], chunksize=1)
    writes = [one for of in beats for one in of]
    return {
        "submit_s": round(submit_s, 2),
        "ring_s": round(ring_s, 2),
        "status_ms": round(1000 * status_s, 1),
        "claim_ms": round(1000 * statistics.median(claims), 1),
        "commit_ms": round(1000 * statistics.median(commits), 1),
        "progress_write_ms": {
            "p50": round(1000 * statistics.median(writes), 1),
            "max": round(1000 * max(writes), 1),
        },
        "shards_written_per_s": round(len(writes) * HELD / seconds),
    }


@click.command()
@click.option("--shards", default=10_000, show_default=True)
@click.option("--workers", default=8, show_default=True)
@click.option("--seconds", default=5.0, show_default=True, help="Of progress writes.")
def main(shards: int, workers: int, seconds: float) -> None:
    """Run it."""
    with site(broker=True) as at:
        click.echo(json.dumps(measure(at, shards, workers, seconds), indent=2))


if __name__ == "__main__":
    main()
