"""`nightmill worker`: one process that holds shards of many jobs in one engine until it is told to stop.

main thread     signals, the fleet's turns, loading of models
celery          hears the bells (bells.py); its pool threads wait in Fleet.answer
shard-…         one for each shard at work (shard_crew.py)
engine-…        the supervisor of the engine process
heartbeat       renews leases, sees stop flags
janitor         takes back, closes, finalizes, relays (as every worker's does)
metrics, watch  tell how it goes, and end the process when it does not
"""

import logging
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from nightmill.broker import Broker
from nightmill.config import Settings
from nightmill.errors import BrokerError, ExitCode, StoreError
from nightmill.janitor import Janitor
from nightmill.records import Ring
from nightmill.states import Tier
from nightmill.store import LEASE_TTL_S, Store
from nightmill.worker_lock import WorkerLock, new_worker_id
from nightmill_worker.bells import Bells
from nightmill_worker.drain import Drain, InterruptedRunError
from nightmill_worker.engine_session import EngineSession, RunOptions
from nightmill_worker.fleet import Fleet
from nightmill_worker.fleet_janitor import FleetJanitor
from nightmill_worker.fleet_jobs import JobContexts, JobPauses
from nightmill_worker.heartbeat import Heartbeat
from nightmill_worker.liveness import Limits, Pulse, StepClock, Watch, stuck
from nightmill_worker.metrics import MetricsServer, WorkerCollector
from nightmill_worker.model_host import LoadModel, ModelHost
from nightmill_worker.shard_crew import ShardCrew
from nightmill_worker.slots import DEFAULT_SLOTS, TierSlots

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP)
TURN_S = 0.2
BELLS_END_S = 5.0
HARD_STOP_S = 10.0  # beyond the grace time


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Flags of `nightmill worker`."""

    run: RunOptions
    only_model: str | None = None
    slots: Mapping[Tier, int] = field(default_factory=lambda: dict(DEFAULT_SLOTS))
    slice_s: float = 300.0
    lease_ttl_s: float = LEASE_TTL_S
    metrics_port: int | None = None
    limits: Limits = field(default_factory=Limits)


class FleetWorker:
    """Make one and call `run`, on the main thread, inside `drain.signals(SIGNALS)`."""

    def __init__(
        self,
        options: WorkerOptions,
        settings: Settings,
        load: LoadModel,
        drain: Drain,
        *,
        worker_id: str | None = None,
    ) -> None:
        self._options = options
        self._settings = settings
        self._drain = drain
        self.worker_id = worker_id or new_worker_id()
        self._store = Store(settings.database_url)
        self._broker = _broker(settings)
        self._heartbeat = Heartbeat(self._store, self.worker_id, ttl_s=options.lease_ttl_s)
        self._janitor = FleetJanitor(Janitor(self._store, settings, _broker(settings)))
        self._slots = TierSlots(options.slots)
        self._step_clock = StepClock()
        self._channel_at = time.monotonic()
        self._is_loading = False
        pauses = JobPauses()
        self._host = ModelHost(
            load,
            options.run,
            only=options.only_model,
            make_crew=lambda session: ShardCrew(session.supervisor, self._heartbeat, drain),
            make_contexts=lambda session: self._make_contexts(session, pauses),
        )
        self._fleet = Fleet(
            self._store,
            self._host,
            self._slots,
            drain,
            pauses,
            worker_id=self.worker_id,
            lease_ttl_s=options.lease_ttl_s,
            slice_s=options.slice_s,
            on_end=self._janitor.wake,
        )
        self._bells = self._make_bells()

    def run(self) -> int:
        """Serve until a signal comes; returns the process's exit code.

        Raises:
            NightmillError: The model cannot be loaded, the engine is gone for good, or the port is taken.
        """
        metrics: MetricsServer | None = None
        watch = Watch(self.pulse, self._broker_is_up, self.state, self._options.limits)
        try:
            if self._options.metrics_port is not None:
                collector = WorkerCollector(self._fleet, self._host, self._slots, self.worker_id)
                metrics = MetricsServer(self._options.metrics_port, collector, self.health)
                log.info("metrics and health on port %d", metrics.port)
            with WorkerLock(self._settings.workers_dir, self.worker_id):
                self._wait_for_store()
                self._heartbeat.start()
                watch.start()
                self._serve()
                watch.close()
            return ExitCode.DONE
        finally:
            if metrics is not None:
                metrics.close()
            self._store.close()

    def pulse(self) -> Pulse:
        """How long ago each part last got on."""
        now = time.monotonic()
        serving = self._host.serving
        step_s = None
        if serving is not None:
            supervisor = serving.session.supervisor
            steps = sum(stats.steps for stats in supervisor.stats())
            step_s = self._step_clock.look(steps, has_work=supervisor.status().in_engine > 0)
        return Pulse(
            main_s=None if self._is_loading or self._drain.requested else now - self._fleet.turned_at,
            heartbeat_s=now - self._heartbeat.turned_at,
            database_s=now - self._heartbeat.answered_at,
            step_s=step_s,
            channel_s=None if self._bells is None or self._drain.requested else now - self._channel_at,
        )

    def health(self) -> dict[str, Any]:
        """The object of `/healthz`."""
        pulse = self.pulse()
        reason = stuck(pulse, self._options.limits, self._broker_is_up)
        status = "stuck" if reason else "draining" if self._drain.requested else "loading" if self._is_loading else "ok"
        ages = {name: getattr(pulse, name) for name in Pulse.__slots__}
        return {"status": status, "reason": reason, "worker": self.worker_id, "silent": ages}

    def state(self) -> dict[str, Any]:
        """For the log of a worker that is stuck."""
        serving = self._host.serving
        shards = [
            {"shard_id": run.lease.shard_id, "job": run.lease.job_id, "attempt": run.lease.attempt}
            | {"reading": run.is_reading, "running": run.progress.rows_running}
            for run in (serving.crew.active if serving is not None else ())
        ]
        feed = str(serving.session.supervisor.status()) if serving is not None else None
        threads = [thread.name for thread in threading.enumerate()]
        return {"health": self.pulse(), "shards": shards, "feed": feed, "slots": self._slots.used, "threads": threads}

    # -- life ---------------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        self._janitor.start()
        if self._bells is not None:
            self._bells.start()
        try:
            while not self._drain.requested:
                self._turn()
                self._fleet.wait(TURN_S)
        except InterruptedRunError:
            pass  # a signal while a model was loading
        finally:
            self._wind_down()

    def _turn(self) -> None:
        if self._host.wanted is None:
            self._fleet.turn()
            return
        self._is_loading = True  # a turn that loads a model may take minutes
        try:
            with self._drain.breakable():
                self._fleet.turn()
        finally:
            self._is_loading = False

    def _wind_down(self) -> None:
        """Finish what runs within the grace time, give the rest back, ring for it."""
        hard_stop = _HardStop(self._drain)
        log.info("stopping: rows that run may finish; once more stops at once")
        if not self._drain.requested:  # by an error of ours: nothing could finish
            self._drain.request()
            self._drain.request()
        self._fleet.stop_bells()
        if self._bells is not None:
            self._bells.stop()
        serving = self._host.serving
        if serving is not None:
            serving.session.supervisor.stop_admitting()
            while serving.crew.active:
                serving.crew.wait(TURN_S)
        self._host.close()
        self._heartbeat.close()
        self._janitor.close()
        if self._bells is not None and not self._bells.join(BELLS_END_S):
            log.warning("the celery worker does not end: its connection ends with the process")
        hard_stop.cancel()

    def _wait_for_store(self) -> None:
        """A store that is not there yet is waited for, as at the start of a whole fleet."""
        while not self._drain.requested:
            try:
                self._store.migrate()
                return
            except StoreError as error:
                log.warning("waiting for the store: %s", error)
                self._drain.wait(random.uniform(1.0, 3.0))

    # -- parts --------------------------------------------------------------------------------------------------------

    def _make_contexts(self, session: EngineSession, pauses: JobPauses) -> JobContexts:
        return JobContexts(session, self._store, pauses, lease_ttl_s=self._options.lease_ttl_s)

    def _make_bells(self) -> Bells | None:
        if self._broker is None or self._settings.broker_url is None:
            return None
        return Bells(
            self._settings.broker_url,
            self.worker_id,
            self._options.slots,
            answer=self._fleet.answer,
            ring_again=self._ring_again,
            declare=self._broker.declare,
            handles=self._fleet.handles,
            pulse=self._note_channel,
        )

    def _note_channel(self) -> None:
        self._channel_at = time.monotonic()

    def _ring_again(self, shard_id: int, tier: Tier) -> None:
        assert self._broker is not None
        try:
            self._broker.publish([Ring(shard_id=shard_id, tier=tier)])
        except BrokerError as error:
            log.warning("ringing for shard %d is left to the janitor: %s", shard_id, error)

    def _broker_is_up(self) -> bool:
        url = urlsplit(self._settings.broker_url or "")
        try:
            with socket.create_connection((url.hostname or "localhost", url.port or 5672), timeout=2.0):
                return True
        except OSError:
            return False


class _HardStop:
    """Ends the process when a drain takes much longer than its grace time: leases make that safe."""

    def __init__(self, drain: Drain) -> None:
        self._timer = threading.Timer(drain.grace_s + HARD_STOP_S, self._stop)
        self._timer.daemon = True
        self._timer.start()

    def cancel(self) -> None:
        """It ended by itself."""
        self._timer.cancel()

    def _stop(self) -> None:
        log.critical("the drain does not end: exiting, what is left is taken back when its leases run out")
        sys.stderr.flush()
        os._exit(ExitCode.FAILED)


def _broker(settings: Settings) -> Broker | None:
    return None if settings.broker_url is None else Broker(settings.broker_url, queue_type=settings.queue_type)


def end_process(code: int) -> None:
    """Exit without waiting for threads that wait for a broker or a store: nothing of theirs is worth it."""
    if any(thread.is_alive() and not thread.daemon for thread in threading.enumerate()[1:]):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
