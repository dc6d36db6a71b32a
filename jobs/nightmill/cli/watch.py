"""`nightmill watch`: a job, or all that run, as they go."""

import click

from nightmill.cli.find import find_job, job_argument, open_store
from nightmill.cli.fleet_view import watch_fleet
from nightmill.cli.follow import follow, warn_if_nobody_runs
from nightmill.cli.job_view import job_fields
from nightmill.cli.outcome import tell_outcome
from nightmill.cli.show import json_option, show_fields
from nightmill.cli.watch_view import terminal_view
from nightmill.states import TERMINAL_JOB


@click.command(epilog="Examples: nightmill watch answers/; nightmill watch --all")
@job_argument
@click.option("--all", "everything", is_flag=True, help="All jobs that have not ended, by tier, until none is left.")
@click.option(
    "--every", type=click.FloatRange(0.2, 3600), default=5.0, show_default=True, metavar="S",
    help="Seconds between lines, where there is no terminal to redraw.",
)  # fmt: skip
@json_option
def watch(job: str | None, everything: bool, every: float, as_json: bool) -> int:
    """Show how a job goes until it has ended: rows/s, tokens/s, ETA. A restart of the database is waited out.

    On a terminal it is redrawn in place; elsewhere a line every few seconds. Ctrl-C ends the watching, not the job.
    With --json: one object a line. The exit code is that of `nightmill wait`.
    """
    if everything and job is not None:
        raise click.UsageError("--all shows every job: name none")
    with open_store() as store:
        if everything:
            watch_fleet(store, every_s=every, as_json=as_json)
            return 0
        info = find_job(store, job)
        if info.status not in TERMINAL_JOB:
            warn_if_nobody_runs(store, info)
        info = follow(store, info.job_id, terminal_view(every_s=every, as_json=as_json))
    if not as_json:
        show_fields(job_fields(info))
    return tell_outcome(info)
