"""Does memory grow with the job? Peaks of submitter, worker and engine process at several sizes; real database.

`python -m bench.fleet.memory [--sizes 10000,100000,1000000] [--shard-rows 2000]`

Each size has a worker of its own with a scripted engine that takes no time, on local folders. Peaks are the kernel's
(VmHWM, ru_maxrss).
"""

import os
import subprocess
import time
from pathlib import Path

import click
from bench.fleet.site import NIGHTMILL, Site, site

from nightmill.states import TERMINAL_JOB

SLOTS = 256


def peaks_mib(pid: int) -> tuple[float, float]:
    """Of a worker: its own process, and the largest of its children, the engine."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children += [child for task in tasks for child in (task / "children").read_text().split()]
    return _peak(pid), max((_peak(int(child)) for child in children), default=0.0)


def _peak(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    return 0.0


def measure(at: Site, rows: int, shard_rows: int) -> dict[str, float]:
    """One size."""
    path, out = at.write(f"in-{rows}", rows), at.folder / f"out-{rows}"
    flags = ["--model", "fake", "--max-tokens", "1", "--shard-rows", str(shard_rows)]
    begun = time.monotonic()
    submitter = subprocess.Popen(
        [NIGHTMILL, "submit", path, "-o", str(out), *flags], env=at.environment, stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(submitter.pid, 0)
    assert status == 0, status
    submit_s = time.monotonic() - begun
    job = at.store.jobs()[0]
    with at.worker({}, "--max-num-seqs", str(SLOTS), "--model", "fake") as worker:
        while (job := at.store.job(job.job_id)).status not in TERMINAL_JOB:
            assert worker.poll() is None, (at.folder / "worker.log").read_text()[-3000:]
            time.sleep(0.2)
        peaks = peaks_mib(worker.pid)
    assert job.rows.completed == rows, job
    assert job.started_at is not None
    assert job.finished_at is not None
    Path(path).unlink()
    run_s = (job.finished_at - job.started_at).total_seconds()
    return {
        "submit_s": submit_s,
        "submitter_mib": usage.ru_maxrss / 1024,
        "run_s": run_s,
        "rows_per_s": rows / run_s,
        "worker_mib": peaks[0],
        "engine_mib": peaks[1],
    }


@click.command()
@click.option("--sizes", default="10000,100000,1000000", show_default=True)
@click.option("--shard-rows", default=2000, show_default=True)
def main(sizes: str, shard_rows: int) -> None:
    """Run it."""
    with site(broker=False) as at:
        for number, rows in enumerate(map(int, sizes.split(","))):
            figures = measure(at, rows, shard_rows)
            if not number:
                click.echo(f"{'rows':>9}" + "".join(f"{name:>15}" for name in figures))
            click.echo(f"{rows:9,}" + "".join(f"{value:15,.1f}" for value in figures.values()))


if __name__ == "__main__":
    main()
