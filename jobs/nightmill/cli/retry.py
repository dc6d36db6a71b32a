"""`nightmill retry`: the rows of an ended job that have no completion run again; the others are not touched."""

import click

from nightmill.cli.find import find_job, open_store
from nightmill.cli.follow import follow
from nightmill.cli.job_view import job_object
from nightmill.cli.outcome import tell_outcome
from nightmill.cli.show import json_option, quiet_option, show_json, show_note, show_value
from nightmill.cli.wait import LINE_EVERY_S
from nightmill.cli.watch_view import terminal_view
from nightmill.config import Settings
from nightmill.errors import ExitCode
from nightmill.run_command import run_command
from nightmill.states import TERMINAL_JOB
from nightmill.submission import retry_and_ring


@click.command(epilog="Example: nightmill retry answers/ --wait")
@click.argument("job", metavar="JOB|OUTPUT")
@click.option("--wait", "stay", is_flag=True, help="Wait until the job has ended again.")
@json_option
@quiet_option
def retry(job: str, stay: bool, as_json: bool, quiet: bool) -> int:
    """Run the rows again that failed, were cancelled or expired; prints how many.

    The parts are replaced one by one, each at once: readers see the old or the new one. In a store on this machine
    the rows wait for `nightmill worker`, or for the job's `nightmill run` command once more.
    """
    settings = Settings.from_env()
    with open_store() as store:
        info = find_job(store, job)
        num_rows, trouble = retry_and_ring(store, settings, info)
        if not as_json:
            show_value(num_rows)
        if trouble is not None and not quiet:
            show_note(f"warning: the broker could not be rung, the janitor will: {trouble}")
        if num_rows and settings.is_embedded and not quiet:
            show_note(f"`nightmill worker` on this machine takes them, or:\n  {run_command(info.spec, info.options)}")
        info = store.job(info.job_id)
        if stay and info.status not in TERMINAL_JOB:
            info = follow(store, info.job_id, terminal_view(every_s=LINE_EVERY_S, quiet=quiet))
    if as_json:
        show_json({"rows_retried": num_rows, **job_object(info)})
    elif not quiet:
        show_note(f"{num_rows:,} rows of job {info.job_id} run again" if num_rows else "every row has a completion")
    return tell_outcome(info) if stay else ExitCode.DONE
