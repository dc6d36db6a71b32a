"""The janitor that every worker carries: a sweep every few seconds, and at once when a shard has ended."""

import logging
import random
import threading

from nightmill.errors import NightmillError
from nightmill.janitor import EVERY_S, Janitor

log = logging.getLogger(__name__)


class FleetJanitor:
    """A thread; what fails is tried again in its next sweep."""

    def __init__(self, janitor: Janitor) -> None:
        self._janitor = janitor
        self._woken = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="janitor", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def wake(self) -> None:
        """A shard was committed, or given back for a job that stops: its job may be at its end."""
        self._woken.set()

    def close(self) -> None:
        """One last sweep, so that what this worker gave back is rung for; then the end."""
        self._stopped = True
        self._woken.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped:
            self._woken.wait(EVERY_S * random.uniform(0.7, 1.3))
            self._woken.clear()
            try:
                report = self._janitor.sweep()
                if report.did_something:
                    log.info("swept: %s", report)
            except NightmillError as error:
                log.warning("the sweep was broken off: %s", error)
