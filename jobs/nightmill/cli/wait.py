"""`nightmill wait`: for schedulers; the exit code says how the job ended."""

import click

from nightmill.cli.find import find_job, job_argument, open_store
from nightmill.cli.follow import follow, warn_if_nobody_runs
from nightmill.cli.job_view import job_object
from nightmill.cli.outcome import tell_outcome
from nightmill.cli.param_types import Duration
from nightmill.cli.show import json_option, quiet_option, show_json
from nightmill.cli.watch_view import terminal_view
from nightmill.states import TERMINAL_JOB

LINE_EVERY_S = 60.0
"""In the log of a scheduler."""


@click.command(epilog="Example: nightmill wait answers/ --timeout 6h || alert")
@job_argument
@click.option("--timeout", type=Duration(), help="Stop waiting after this long, with exit code 124; the job goes on.")
@json_option
@quiet_option
def wait(job: str | None, timeout: float | None, as_json: bool, quiet: bool) -> int:
    """Wait until a job has ended; a restart of the database is waited out.

    Exit codes: 0 done, 1 failed, 5 every row failed or more than --max-failed-rows, 6 cancelled or expired, 124 timed
    out. With --json: the job at its end.
    """
    with open_store() as store:
        info = find_job(store, job)
        if info.status not in TERMINAL_JOB:
            warn_if_nobody_runs(store, info)
        info = follow(store, info.job_id, terminal_view(every_s=LINE_EVERY_S, quiet=quiet), timeout_s=timeout)
    if as_json:
        show_json(job_object(info))
    return tell_outcome(info)
