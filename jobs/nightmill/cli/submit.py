"""`nightmill submit`: write a job down and ring for it; workers do the rest. Needs no model and no torch."""

from typing import Any

import click

from nightmill.cli.find import open_store
from nightmill.cli.follow import follow
from nightmill.cli.job_options import job_flags, read_job
from nightmill.cli.job_view import job_object
from nightmill.cli.outcome import tell_outcome
from nightmill.cli.param_types import Duration
from nightmill.cli.planning_view import planning_view
from nightmill.cli.sections import SectionedCommand
from nightmill.cli.show import json_option, quiet_option, show_json, show_note, show_value
from nightmill.cli.wait import LINE_EVERY_S
from nightmill.cli.watch_view import terminal_view
from nightmill.config import Settings
from nightmill.errors import ExitCode
from nightmill.job_flags import ignored_options
from nightmill.records import JobInfo, JobOptions, JobSpec
from nightmill.states import TERMINAL_JOB, JobStatus
from nightmill.store import Store
from nightmill.submission import submit_and_ring

EPILOG = """\b
Examples:
  nightmill submit s3://lake/prompts/ -o s3://lake/answers/ --model org/name --wait
  job=$(nightmill submit prompts/ -o answers/ --model demo --idempotency-key daily-2026-11-29)

The same command again finds the same job. Exit code 3: the input does not fit, and nothing was submitted."""


@click.command(cls=SectionedCommand, epilog=EPILOG)
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@job_flags
@click.option("--wait", "stay", is_flag=True, help="Wait until the job has ended; exit codes as `nightmill wait`.")
@click.option("--timeout", type=Duration(), help="With --wait: stop waiting after this long, with exit code 124.")
@json_option
@quiet_option
def submit(
    inputs: tuple[str, ...],
    output: str,
    stay: bool,
    timeout: float | None,
    as_json: bool,
    quiet: bool,
    **flags: Any,
) -> int:
    """Submit a job to the workers, and print its id.

    INPUT is a Parquet file, a folder of them, a quoted glob, or a .jsonl file in OpenAI's batch form; s3:// or a path
    that the workers see, too. Only footers and ids are read here.
    """
    if timeout is not None and not stay:
        raise click.UsageError("--timeout is of --wait")
    spec, options = read_job(inputs, output, flags)
    settings = Settings.from_env()
    with open_store() as store:
        with planning_view(quiet=quiet) as progress:
            job, trouble = submit_and_ring(store, settings, spec, options, progress=progress)
        if not as_json:
            show_value(job.job_id)
        if not quiet:
            _tell(job, spec, options, settings, trouble)
        if stay and job.status not in TERMINAL_JOB:
            job = _stay(store, job, timeout, quiet=quiet)
    if as_json:
        show_json(job_object(job))
    return tell_outcome(job) if stay else ExitCode.DONE


def _stay(store: Store, job: JobInfo, timeout: float | None, *, quiet: bool) -> JobInfo:
    return follow(store, job.job_id, terminal_view(every_s=LINE_EVERY_S, quiet=quiet), timeout_s=timeout)


def _tell(job: JobInfo, spec: JobSpec, options: JobOptions, settings: Settings, trouble: str | None) -> None:
    if job.status in TERMINAL_JOB:
        show_note(f"job {job.job_id} was submitted before and is {job.status.value}: {job.spec.output}")
    else:
        before = "" if job.status is JobStatus.QUEUED else ", submitted before"
        what = f"{job.rows.total:,} rows in {job.num_shards:,} shards → {job.spec.output}"
        show_note(f"job {job.job_id} is {job.status.value}{before}: {what}")
    for line in ignored_options(options, job):
        show_note(line)
    if job.status in TERMINAL_JOB:
        return
    if trouble is not None:
        show_note(f"warning: queued, but the broker could not be rung: {trouble}")
        show_note("  Nothing is lost: the workers look into the store, and their janitor rings later.")
    if settings.is_embedded:
        show_note("the store is a file on this machine: `nightmill worker` here takes the job")
    elif local := next((uri for uri in (*spec.inputs, spec.output) if "://" not in uri), None):
        show_note(f"note: {local} is a path: every worker must see it under this name")
