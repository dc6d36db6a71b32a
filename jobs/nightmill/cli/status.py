"""`nightmill status`: how far one job is."""

from datetime import UTC, datetime, timedelta

import click

from nightmill.cli.find import find_job, job_argument, open_store
from nightmill.cli.job_view import job_fields, job_object
from nightmill.cli.show import json_option, show_fields, show_json, show_note
from nightmill.records import JobInfo
from nightmill.states import TERMINAL_JOB, JobStatus
from nightmill.store import Store

CLOSING_TAKES = timedelta(minutes=1)  # beyond it something is in the way


@click.command(epilog="Example: nightmill status answers/ --json | jq .request_counts")
@job_argument
@json_option
def status(job: str | None, as_json: bool) -> None:
    """Show how far a job is: by its id, by its output location, or the last one.

    With --json: OpenAI's Batch object, and our own fields after it.
    """
    with open_store() as store:
        info = find_job(store, job)
        waits_for = _waits_for(store, info)
    if as_json:
        show_json(job_object(info))
    else:
        show_fields(job_fields(info))
    if waits_for is not None:
        show_note(f"note: {waits_for}; where that lasts, `nightmill janitor --once` says what is in the way")


def _waits_for(store: Store, job: JobInfo) -> str | None:
    """What only a janitor can do for this job and has not done: a file cannot be written, or no janitor runs."""
    moved_at = job.last_progress_at or job.started_at or job.created_at
    if job.status in TERMINAL_JOB or datetime.now(UTC) - moved_at < CLOSING_TAKES:
        return None
    if job.status is JobStatus.FINALIZING:
        return "it waits to be ended"
    return "shards wait to be closed" if store.due_for_closing(1, job.job_id) else None
