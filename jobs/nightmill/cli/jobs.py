"""`nightmill list`: the jobs of this store."""

import click

from nightmill.cli.find import open_store
from nightmill.cli.job_view import job_object
from nightmill.cli.show import iso, json_option, show_json, show_table
from nightmill.states import JobStatus

_MOST = 2**31  # a database's integers end somewhere


@click.command("list", epilog="Example: nightmill list --status in_progress")
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True, help="At most this many, newest first.")
@click.option("--status", type=click.Choice([s.value for s in JobStatus]), help="Only jobs of this status.")
@json_option
def list_jobs(limit: int, status: str | None, as_json: bool) -> None:
    """List jobs, newest first."""
    with open_store() as store:
        found = store.jobs(limit=min(limit, _MOST), status=JobStatus(status) if status else None)
    if as_json:
        show_json([job_object(job) for job in found])
        return
    rows = [
        (
            job.job_id,
            job.status.value,
            job.rows.total,
            job.rows.completed,
            job.rows.failed,
            iso(job.created_at),
            job.spec.output,
        )
        for job in found
    ]
    show_table(("JOB", "STATUS", "ROWS", "COMPLETED", "FAILED", "CREATED", "OUTPUT"), rows)
