"""`nightmill status`: how far one job is."""

import click

from nightmill.cli.find import find_job, job_argument, open_store
from nightmill.cli.job_view import job_fields, job_object
from nightmill.cli.show import json_option, show_fields, show_json


@click.command(epilog="Example: nightmill status answers/ --json | jq .request_counts")
@job_argument
@json_option
def status(job: str | None, as_json: bool) -> None:
    """Show how far a job is: by its id, by its output location, or the last one.

    With --json: OpenAI's Batch object, and our own fields after it.
    """
    with open_store() as store:
        info = find_job(store, job)
    if as_json:
        show_json(job_object(info))
    else:
        show_fields(job_fields(info))
