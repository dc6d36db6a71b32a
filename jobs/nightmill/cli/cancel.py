"""`nightmill cancel`: stop a job and keep what is finished."""

import click

from nightmill.cli.find import find_job, open_store
from nightmill.cli.show import json_option, show_json, show_note


@click.command(epilog="Example: nightmill cancel answers/")
@click.argument("job", metavar="JOB|OUTPUT")
@json_option
def cancel(job: str, as_json: bool) -> None:
    """Stop a job. Rows that are finished stay; the others end as batch_cancelled."""
    with open_store() as store:
        info = find_job(store, job)
        store.cancel(info.job_id)
        info = store.job(info.job_id)
    if as_json:
        show_json({"id": info.job_id, "status": info.status.value})
    else:
        show_note(f"job {info.job_id} is {info.status.value}")
