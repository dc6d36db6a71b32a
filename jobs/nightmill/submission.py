"""Submit for a fleet: look at the input, write the job down, ring. What the command and the client have in common."""

from dataclasses import replace
from functools import partial
from pathlib import Path

from nightmill.config import Settings
from nightmill.records import JobInfo, JobOptions, JobSpec
from nightmill.ringing import ring
from nightmill.store import Store
from nightmill.submit import PlanProgress, say_nothing, submit_job
from nightmill.validate import check_sources


def submit_and_ring(
    store: Store, settings: Settings, spec: JobSpec, options: JobOptions, *, progress: PlanProgress = say_nothing
) -> tuple[JobInfo, str | None]:
    """The job, and why the broker could not be rung (None: it was, or there is none). May be called again.

    Raises:
        ValidationError: the input does not fit, or output or key belong to another job; nothing was submitted.
    """
    spec = replace(spec, model=replace(spec.model, model=absolute_model(spec.model.model)))
    job = submit_job(store, spec, options, check=partial(check_sources, progress=progress), progress=progress)
    return job, ring(store, settings)


def absolute_model(model: str) -> str:
    """A model that is a path, from any working directory: a worker has another one. Other names stay as they are."""
    path = Path(model)
    return str(path.absolute()) if path.exists() and ("/" in model or path.suffix == ".gguf") else model


def retry_and_ring(store: Store, settings: Settings, job: JobInfo) -> tuple[int, str | None]:
    """Open the rows of an ended job that have no completion again; how many, and why the broker could not be rung.

    Raises:
        JobStateError: it has not ended, or its output belongs to another job now.
    """
    if not store.reset_failed_rows(job.job_id):
        return 0, None
    return job.rows.failed + job.rows.cancelled, ring(store, settings)
