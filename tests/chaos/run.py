"""`make chaos SEEDS=5 DURATION=90`: runs, a table, bench/chaos/last.json; exit code 1 when any promise was broken."""

import json
import logging
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import click
from tests.chaos.drill import Drill, Result, run_drill

from deploy.native.ceph import Ceph
from deploy.native.folder import remove, scratch
from deploy.native.postgres import Postgres
from deploy.native.rabbitmq import Rabbitmq

ROOT = Path(__file__).parents[2]
LAST = ROOT / "bench/chaos/last.json"
FULL_ROWS, FULL_S = 60_000, 90
COLUMNS = ("seed", "seconds", "rows", "distinct", "missing", "doubled", "recomputed", "recompute_limit", "orphans")


@click.command()
@click.option("--seeds", type=click.IntRange(1), default=5, show_default=True, help="How many runs: seeds 1, 2, …")
@click.option("--first-seed", type=int, default=1, show_default=True)
@click.option("--duration", type=click.FloatRange(5), default=FULL_S, show_default=True, help="Seconds of faults.")
@click.option("--rows", type=click.IntRange(1), help=f"Default: {FULL_ROWS:,}, or fewer for less than {FULL_S} s.")
@click.option("--keep", is_flag=True, help="Keep the folder with all logs, also when nothing was wrong.")
def main(seeds: int, first_seed: int, duration: float, rows: int | None, keep: bool) -> None:
    """Break everything at random, and count what is left."""
    logging.getLogger("nightmill").setLevel(logging.ERROR)  # that a submission is tried again is no news here
    rows = rows or round(FULL_ROWS * min(1.0, duration / FULL_S))
    folder = scratch("nightmill-chaos")
    results: list[Result] = []
    postgres, rabbitmq = Postgres(folder / "postgres"), Rabbitmq(folder / "rabbitmq")
    ceph = Ceph(folder / "ceph")
    try:
        click.echo("starting PostgreSQL, RabbitMQ and Ceph", err=True)
        for server in (postgres, rabbitmq, ceph):
            server.start()
        for seed in range(first_seed, first_seed + seeds):
            click.echo(f"seed {seed}: {rows:,} rows, {duration:.0f} s of faults", err=True)
            drill = Drill(
                seed=seed,
                duration_s=duration,
                rows=rows,
                folder=folder / f"seed-{seed}",
                postgres=postgres,
                rabbitmq=rabbitmq,
                ceph=ceph,
            )
            results.append(run_drill(drill))
            for violation in results[-1].violations:
                click.echo(f"seed {seed}: BROKEN: {violation}", err=True)
    finally:
        for server in (ceph, rabbitmq, postgres):
            server.stop()
    _write(results, duration, rows)
    click.echo(table(results))
    broken = any(result.violations for result in results)
    if broken or keep:
        shutil.rmtree(folder / "ceph", ignore_errors=True)
        click.echo(f"logs of workers and journals: {folder}", err=True)
    else:
        remove(folder)
    sys.exit(1 if broken else 0)


def table(results: list[Result]) -> str:
    """One line a run."""
    head = [*COLUMNS, "attempts", "kills w/b/p/s/j/e", "urgent p50/max ms", "exits", "broken"]
    lines = []
    for result in results:
        values = [str(getattr(result, name)) for name in COLUMNS]
        kills = "/".join(str(count) for count in result.kills.values())
        urgent = f"{result.urgent_ms['p50']}/{result.urgent_ms['max']}"
        exits = str(result.worker_exits or "-")
        lines.append([*values, str(result.max_attempts), kills, urgent, exits, str(len(result.violations))])
    widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in [head, *lines])


def _write(results: list[Result], duration: float, rows: int) -> None:
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    machine = f"{platform.machine()}, {len(os.sched_getaffinity(0))} CPUs"
    LAST.parent.mkdir(parents=True, exist_ok=True)
    record = {"commit": commit, "machine": machine, "duration_s": duration, "bulk_rows": rows}
    record["seeds"] = [asdict(result) for result in results]
    LAST.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
