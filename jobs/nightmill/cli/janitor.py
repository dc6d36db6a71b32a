"""`nightmill janitor`: the janitor of every worker, as a process of its own."""

import signal
import threading
import time
from dataclasses import asdict

import click

from nightmill.broker import Broker
from nightmill.cli.show import show_json, show_note
from nightmill.config import Settings
from nightmill.errors import ExitCode
from nightmill.janitor import Janitor, JanitorReport
from nightmill.logs import FORMATS, set_up_logs
from nightmill.store import Store
from nightmill.worker_lock import WorkerLock, new_worker_id

OTHERS_S = 10.0


@click.command(epilog="Example: nightmill janitor --once --json")
@click.option("--once", is_flag=True, help="One sweep, then end; exit code 1 when something in it failed.")
@click.option("--json", "as_json", is_flag=True, help="With --once: what was done, as JSON on stdout.")
@click.option("--log-format", type=click.Choice(FORMATS), default="json", show_default=True)
def janitor(once: bool, as_json: bool, log_format: str) -> int:
    """Take back leases that have run out, ring for shards, close what was stopped, end jobs.

    Each worker does this, too, and of all of them one at a time: run it where jobs must end although no worker is left.
    Needs DATABASE_URL; CELERY_BROKER_URL to ring.
    """
    settings = Settings.from_env()
    broker = None if settings.broker_url is None else Broker(settings.broker_url, queue_type=settings.queue_type)
    store = Store(settings.database_url)
    worker_id = new_worker_id()
    set_up_logs(log_format, settings.log_level if once else _at_least_info(settings.log_level), worker_id)
    try:
        store.migrate()
        with WorkerLock(settings.workers_dir, worker_id):
            work = Janitor(store, settings, broker, worker_id=worker_id)
            if once:
                return _show(_sweep_once(work), as_json)
            work.run(_stopped_by_signals())
            return ExitCode.DONE
    finally:
        store.close()
        if broker is not None:
            broker.close()


def _sweep_once(work: Janitor) -> JanitorReport:
    """One sweep that is the only one: those of a running fleet take moments, so one that is at work is waited for."""
    deadline = time.monotonic() + OTHERS_S
    while not (report := work.sweep()).granted and time.monotonic() < deadline:
        time.sleep(0.2)
    return report


def _at_least_info(level: str) -> str:
    """The loop is nobody's foreground: it says what it does."""
    return level if level == "debug" else "info"


def _stopped_by_signals() -> threading.Event:
    """Set by SIGTERM and SIGINT: the sweep that runs is finished first."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop


def _show(report: JanitorReport, as_json: bool) -> int:
    if as_json:
        show_json(asdict(report))
    else:
        show_note(report.line() if report.granted else "another janitor is at work")
    return ExitCode.FAILED if report.troubles else ExitCode.DONE
