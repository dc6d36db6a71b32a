"""`nightmill cancel`: stop a job and keep what is finished."""

import click

from nightmill.cli.find import find_job, open_store
from nightmill.cli.show import json_option, show_json, show_note
from nightmill.config import Settings
from nightmill.janitor import sweep
from nightmill.output.closer import wind_up
from nightmill.states import JobStatus
from nightmill.worker_lock import WorkerLock, new_worker_id


@click.command(epilog="Example: nightmill cancel answers/")
@click.argument("job", metavar="JOB|OUTPUT")
@json_option
def cancel(job: str, as_json: bool) -> None:
    """Stop a job. Rows that are finished stay; the others end as batch_cancelled.

    Whoever runs it stops within two seconds; when nobody does, its output is closed here.
    """
    settings = Settings.from_env()
    with open_store() as store:
        info = store.cancel(find_job(store, job).job_id)
        if info.status is JobStatus.CANCELLING:
            with WorkerLock(settings.workers_dir, new_worker_id()) as lock:
                sweep(store, settings.workers_dir)
                wind_up(store, info.job_id, lock.worker_id, info.spec.model.model)
            info = store.job(info.job_id)
    if as_json:
        show_json({"id": info.job_id, "status": info.status.value, "output": info.spec.output})
        return
    if info.status is JobStatus.CANCELLING:
        show_note(f"job {info.job_id} is cancelling: the process that runs it stops within two seconds")
    else:
        show_note(f"job {info.job_id} is {info.status.value}; what was finished is in {info.spec.output}")
