"""Celery's worker, on a thread of its own: it hears the bells. While the broker is away, the fleet does without."""

import logging
import random
import threading
from collections.abc import Callable, Mapping

from celery import Celery
from celery.worker import WorkController
from celery.worker import state as celery_state

from nightmill.errors import NightmillError
from nightmill.states import Tier
from nightmill_worker.app import make_app
from nightmill_worker.tasks import Answer, RingAgain, register
from nightmill_worker.tiers import add_tier_consumers

log = logging.getLogger(__name__)

RESTART_S = 2.0
FIRST_WAIT_S, MAX_WAIT_S = 0.5, 8.0  # for a broker that is away or refuses us: doubling


class Bells:
    """Hears the broker until it is closed. One in a process: Celery's flags are global."""

    def __init__(
        self,
        broker_url: str,
        worker_id: str,
        slots: Mapping[Tier, int],
        *,
        answer: Answer,
        ring_again: RingAgain,
        declare: Callable[[], None],
        handles: Callable[[int], bool],
        pulse: Callable[[], None],
    ) -> None:
        self._worker_id = worker_id
        self._slots = slots
        self._declare = declare
        self._pulse = pulse
        self._app: Celery = make_app(broker_url, worker_id)
        register(self._app, answer, ring_again)
        add_tier_consumers(self._app, slots, declare=declare, handles=handles, pulse=pulse)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="celery", daemon=True)

    def start(self) -> None:
        """Begin to listen; a broker that is down is waited for."""
        self._thread.start()

    def stop(self) -> None:
        """Ask for the end; returns at once."""
        self._closing.set()
        celery_state.should_stop = 0

    def join(self, timeout_s: float) -> bool:
        """Wait for the end; False when it takes longer."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _wait_for_broker(self) -> bool:
        """Until it takes us; False when closed. Celery would ask one that refuses our password five times a second."""
        pause_s = FIRST_WAIT_S
        while not self._closing.is_set():
            try:
                self._declare()
                return True
            except NightmillError as error:
                self._pulse()  # not stuck, but refused: that a restart does not heal, and shards come from the store
                log.error("waiting for the broker, shards are looked for in the store meanwhile: %s", error)
            self._closing.wait(pause_s * random.uniform(0.7, 1.3))
            pause_s = min(2 * pause_s, MAX_WAIT_S)
        return False

    def _run(self) -> None:
        while self._wait_for_broker():
            worker = WorkController(
                app=self._app,
                hostname=f"nightmill@{self._worker_id}",
                pool="threads",  # never prefork: the engine and its device do not survive a fork
                # Twice the slots: threads that wait for one tier's slots must not use up another's.
                concurrency=2 * sum(self._slots.values()),
                loglevel="WARNING",
                without_gossip=True,
                without_mingle=True,
                without_heartbeat=True,
            )
            ended: object = None
            try:
                worker.start()
            except Exception as error:  # noqa: BLE001 - whatever its shutdown meets: a worker without this thread is deaf
                ended = repr(error)
            if not self._closing.wait(RESTART_S):
                log.error("the celery worker ended by itself (%s) and is started again", ended or worker.exitcode)
