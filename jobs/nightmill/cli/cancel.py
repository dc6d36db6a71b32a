"""`nightmill cancel`: stop a job and keep what is finished."""

import click

from nightmill.cli.find import find_job, open_store
from nightmill.cli.follow import terminable
from nightmill.cli.param_types import Duration
from nightmill.cli.show import json_option, show_json, show_note
from nightmill.config import Settings
from nightmill.janitor import sweep
from nightmill.output.closer import wind_up
from nightmill.records import JobInfo
from nightmill.states import JobStatus
from nightmill.store import Store
from nightmill.waiting import looks
from nightmill.worker_lock import WorkerLock, new_worker_id


@click.command(epilog="Example: nightmill cancel answers/ --wait")
@click.argument("job", metavar="JOB|OUTPUT")
@click.option("--wait", "stay", is_flag=True, help="Until it has taken effect, also when no worker is left.")
@click.option("--timeout", type=Duration(), help="With --wait: stop waiting after this long, with exit code 124.")
@json_option
def cancel(job: str, stay: bool, timeout: float | None, as_json: bool) -> None:
    """Stop a job. Rows that are finished stay; the others end as batch_cancelled.

    Whoever runs it stops within two seconds; what nobody runs is closed here, which needs access to the output.
    """
    if timeout is not None and not stay:
        raise click.UsageError("--timeout is of --wait")
    settings = Settings.from_env()
    with open_store() as store:
        info = store.cancel(find_job(store, job).job_id)
        if info.status is JobStatus.CANCELLING:
            info = _close(store, settings, info)
        if stay:
            info = _stay(store, settings, info, timeout)
    if as_json:
        show_json({"id": info.job_id, "status": info.status.value, "output": info.spec.output})
        return
    if info.status is JobStatus.CANCELLING:
        show_note(f"job {info.job_id} is cancelling: the process that runs it stops within two seconds")
    else:
        show_note(f"job {info.job_id} is {info.status.value}; what was finished is in {info.spec.output}")


def _close(store: Store, settings: Settings, info: JobInfo) -> JobInfo:
    """Write the parts of shards that nobody holds: of workers that died here at once, of others when leases run out."""
    with WorkerLock(settings.workers_dir, new_worker_id()) as lock:
        sweep(store, settings.workers_dir)
        wind_up(store, info.job_id, lock.worker_id, info.spec.model.model, gives_up=True)
    return store.job(info.job_id)


def _stay(store: Store, settings: Settings, info: JobInfo, timeout_s: float | None) -> JobInfo:
    with terminable():
        for look in looks(store, info.job_id, timeout_s=timeout_s):
            if look.job is None:
                show_note(f"the job store does not answer, trying again: {look.trouble}")
            elif look.job.status is JobStatus.CANCELLING:
                info = _close(store, settings, info)
            else:
                info = look.job
    return info
