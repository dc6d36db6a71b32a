"""How soon does work stop: a job that is cancelled, a worker that gets SIGTERM. Real broker and database.

`python -m bench.fleet.stopping [--step 0.02] [--latency 0.2]`

Cancel: from the request to the last step of the engine, which runs that job alone, and to the final status. Drain:
from the signal to the process's end; what was computed twice, once another worker has finished the job. With
`--latency` the rows lie on S3 (moto), and every call takes so many seconds longer.
"""

import json
import signal
import time

import click
import numpy as np
from bench.fleet.site import Site, site

from nightmill.records import JobInfo, JobOptions, JobSpec, ModelSpec
from nightmill.ringing import ring
from nightmill.sampling import SamplingParams
from nightmill.states import TERMINAL_JOB, ShardState
from nightmill.store import Store
from nightmill.submit import submit_job

FLAGS = ("--max-num-seqs", "64", "--model", "fake", "--grace", "20")


def submit(at: Site, name: str, rows: int, max_tokens: int, shard_rows: int = 200) -> JobInfo:
    """A job, rung for."""
    spec = JobSpec(
        inputs=(at.write(name, rows, shard_rows),),
        output=at.output(name),
        model=ModelSpec(model="fake"),
        sampling=SamplingParams(max_tokens=max_tokens),
    )
    job = submit_job(at.store, spec, JobOptions(shard_rows=shard_rows))
    ring(at.store, at.settings)
    return job


def wait_for_rows(store: Store, job_id: str, rows: int) -> None:
    """Until so many are committed."""
    while store.job(job_id).rows.completed < rows:
        time.sleep(0.02)


def wait_for_end(store: Store, job_id: str) -> JobInfo:
    """Until it has ended."""
    while (job := store.job(job_id)).status not in TERMINAL_JOB:
        time.sleep(0.02)
    return job


def counts(job: JobInfo) -> dict[str, object]:
    """Rows by their end, and whether they add up."""
    rows = job.rows
    parts = {"completed": rows.completed, "failed": rows.failed, "cancelled": rows.cancelled}
    return {"status": str(job.status), **parts, "add_up": sum(parts.values()) == rows.total}


def cancel(at: Site, step_s: float, shards: int) -> dict[str, object]:
    """Figures of a cancel."""
    journal = at.folder / "steps.txt"
    with at.worker({"step_s": step_s, "journal": str(journal)}, *FLAGS):
        job = submit(at, "cancelled", 20_000, 100, 20_000 // shards)
        wait_for_rows(at.store, job.job_id, 400)
        begun = time.monotonic()
        at.store.cancel(job.job_id)  # what `nightmill cancel` does before it waits
        ended = wait_for_end(at.store, job.job_id)
        over = time.monotonic()
        time.sleep(1.0)  # a step that still came would be seen
        last = float(np.loadtxt(journal, ndmin=2)[-1, 0])
    return {
        "to_last_step_s": round(last - begun, 2),
        "to_final_status_s": round(over - begun, 2),
        "shards_closed": ended.num_shards_by_state.get(ShardState.CANCELLED, 0),
        **counts(ended),
    }


def drain(at: Site, step_s: float) -> dict[str, object]:
    """Figures of a SIGTERM."""
    with at.worker({"step_s": step_s}, *FLAGS) as first:
        job = submit(at, "drained", 4_000, 100)
        wait_for_rows(at.store, job.job_id, 400)
        begun = time.monotonic()
        first.send_signal(signal.SIGTERM)
        code = first.wait(60)
        exit_s = time.monotonic() - begun
    left = at.store.job(job.job_id)
    with at.worker({}, *FLAGS):
        ended = wait_for_end(at.store, job.job_id)
    return {
        "signal_to_exit_s": round(exit_s, 2),
        "exit_code": code,
        "committed_then": left.rows.completed,
        "rows_resumed": ended.rows_resumed,
        "rows_recomputed": ended.rows_recomputed,
        **counts(ended),
    }


@click.command()
@click.option("--step", "step_s", default=0.02, show_default=True, help="Seconds of an engine step.")
@click.option("--latency", type=float, help="Rows on S3, with so many seconds added to each call.")
@click.option("--shards", default=40, show_default=True, help="Of the job that is cancelled.")
def main(step_s: float, latency: float | None, shards: int) -> None:
    """Run it."""
    with site(broker=True, s3_latency_s=latency) as at:
        click.echo(json.dumps({"cancel": cancel(at, step_s, shards), "drain": drain(at, step_s)}, indent=2))


if __name__ == "__main__":
    main()
