"""The janitor that every worker carries: takes back, closes, finalizes, relays, every few seconds and when woken."""

import logging
import random
import threading
from functools import partial

from nightmill.broker import Broker
from nightmill.config import Settings
from nightmill.errors import NightmillError
from nightmill.janitor import close_due, finalize_due, sweep
from nightmill.output.closer import close_part, finalize
from nightmill.relay import relay
from nightmill.store import Store

log = logging.getLogger(__name__)

EVERY_S = 2.0


class FleetJanitor:
    """A thread; what fails is tried again in its next round."""

    def __init__(self, store: Store, settings: Settings, broker: Broker | None, worker_id: str) -> None:
        self._store = store
        self._settings = settings
        self._broker = broker
        self._worker_id = worker_id
        self._woken = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="janitor", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def wake(self) -> None:
        """A shard was committed: its job may be at its end."""
        self._woken.set()

    def close(self) -> None:
        """One last round, so that what this worker gave back is rung for; then the end."""
        self._stopped = True
        self._woken.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped:
            self._woken.wait(EVERY_S * random.uniform(0.7, 1.3))
            self._woken.clear()
            self._round()

    def _round(self) -> None:
        try:
            sweep(self._store, self._settings.workers_dir)
            if self._broker is not None:
                relay(self._store, self._broker)
            close_due(self._store, self._worker_id, partial(close_part, self._store, ""))
            finalize_due(self._store, partial(finalize, self._store))
        except NightmillError as error:
            log.warning("the janitor's round failed: %s", error)
