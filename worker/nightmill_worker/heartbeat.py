"""Renews the leases of this process, tells progress, and notices when a shard or its job must stop."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from nightmill.errors import NightmillError
from nightmill.records import ShardLease, ShardProgress
from nightmill.store import HEARTBEAT_S, LEASE_TTL_S, Store

log = logging.getLogger(__name__)

STOP_POLL_S = 1.0  # cancel takes effect within two seconds


class Held(Protocol):
    """A leased shard at work."""

    lease: ShardLease
    progress: ShardProgress

    def lose(self) -> None:
        """Another attempt has it."""
        ...

    def stop_job(self) -> None:
        """Its job must stop."""
        ...


class Heartbeat:
    """A thread for all shards of a worker."""

    def __init__(
        self,
        store: Store,
        worker_id: str,
        *,
        ttl_s: float = LEASE_TTL_S,
        sleep: Callable[[float], bool] | None = None,
    ) -> None:
        self._store = store
        self._worker_id = worker_id
        self._ttl_s = ttl_s
        self._every_s = min(HEARTBEAT_S, ttl_s / 4)
        self.turned_at = time.monotonic()  # when the thread last looked
        self.answered_at = time.monotonic()  # when the store last answered it
        self._lock = threading.Lock()
        self._held: dict[int, Held] = {}
        self._stopped = threading.Event()
        self._sleep = sleep or self._stopped.wait
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> "Heartbeat":
        """Begin."""
        self._thread.start()
        return self

    def close(self) -> None:
        """End; the leases are then whoever holds them's to release."""
        self._stopped.set()
        self._thread.join()

    def hold(self, shard: Held) -> None:
        """Keep this lease alive from now on."""
        with self._lock:
            self._held[shard.lease.shard_id] = shard

    def drop(self, shard: Held) -> None:
        """It was committed or given back."""
        with self._lock:
            self._held.pop(shard.lease.shard_id, None)

    def beat(self) -> None:
        """Renew every lease once; those that are lost are told so."""
        held = self._snapshot()
        if not held:
            return
        progress = {i: shard.progress for i, shard in held.items()}
        lost = self._store.heartbeat(self._worker_id, progress, self._ttl_s)
        for shard_id in lost:
            log.warning("the lease of shard %d is lost: its work is dropped", shard_id)
            held[shard_id].lose()

    def look_for_stops(self) -> None:
        """Tell shards whose job was cancelled, has failed or has expired."""
        held = self._snapshot()
        stopped = self._store.stop_requested({shard.lease.job_id for shard in held.values()}) if held else frozenset()
        for shard in held.values():
            if shard.lease.job_id in stopped:
                shard.stop_job()

    def _snapshot(self) -> dict[int, Held]:
        with self._lock:
            return dict(self._held)

    def _run(self) -> None:
        beaten_at = time.monotonic()
        while not self._sleep(min(STOP_POLL_S, self._every_s)):
            self.turned_at = time.monotonic()
            try:
                if time.monotonic() - beaten_at >= self._every_s:
                    self.beat()
                    beaten_at = time.monotonic()
                self.look_for_stops()
                self.answered_at = time.monotonic()
            except NightmillError as error:
                # The store may come back before the leases run out; when it does not, another worker takes over
                # and the commit is refused.
                log.warning("heartbeat failed: %s", error)
