"""`nightmill migrate`: bring the job store to the tables of this version."""

import click

from nightmill.cli.show import json_option, show_json, show_note
from nightmill.config import Settings
from nightmill.errors import ExitCode
from nightmill.schema import REVISION
from nightmill.store import Store


@click.command(epilog="Example: nightmill migrate --check || nightmill migrate")
@click.option("--check", is_flag=True, help="Change nothing; exit code 1 when the store is not at this version.")
@json_option
def migrate(check: bool, as_json: bool) -> int:
    """Bring the job store (DATABASE_URL) to the tables of this version.

    Several may run it at once: one works, the others wait. Every other command does the same when it finds an older
    store, so this one is for deployments that want it done at a certain moment, or by another user.
    """
    store = Store(Settings.from_env().database_url)
    try:
        before = store.revision()
        if not check:
            store.migrate()
    finally:
        store.close()
    if as_json:
        show_json({"from": before, "to": before if check else REVISION, "newest": REVISION})
    elif before == REVISION:
        show_note(f"the store is at {REVISION}: nothing to do")
    else:
        show_note(f"{'the store is behind' if check else 'migrated'}: {before or 'empty'} → {REVISION}")
    return ExitCode.FAILED if check and before != REVISION else ExitCode.DONE
