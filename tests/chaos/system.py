"""The system of a chaos run, and the faults that can be done to it."""

import contextlib
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import psutil
from tests.chaos.plan import Event, Fault, Target
from tests.chaos.workers import ChaosWorker, Supervised

from deploy.native.ceph import Ceph
from deploy.native.faulty_s3 import FaultyS3
from deploy.native.postgres import Postgres
from deploy.native.rabbitmq import Rabbitmq

AWAY_S = 1.5  # how long what was killed stays away, beyond the time that its start takes
WAIT_S = 60.0
TROUBLE_S = 4.0  # how long the object store refuses, or is slow

Found = TypeVar("Found")


@dataclass
class System:
    """Servers that run already, with workers and faults on top.

    Each server is killed and started again by a thread of its own, so that faults overlap.
    """

    postgres: Postgres
    rabbitmq: Rabbitmq
    ceph: Ceph
    proxy: FaultyS3
    workers: list[ChaosWorker]
    janitor: Supervised
    seed: int
    kills: Counter[Target] = field(default_factory=Counter)
    held: list[int] = field(default_factory=list)  # shards in each worker that was killed
    _pools: dict[Target, ThreadPoolExecutor] = field(default_factory=dict)
    _doings: "list[Future[None]]" = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._pools = {target: ThreadPoolExecutor(1, target.value) for target in Target}

    def tend(self) -> None:
        """Start what has ended. From the main thread."""
        for process in (*self.workers, self.janitor):
            process.tend()
        for doing in [doing for doing in self._doings if doing.done()]:
            self._doings.remove(doing)
            doing.result()  # a fault that could not be done is an error of the run

    def do(self, event: Event) -> None:
        """Begin a fault; returns at once."""
        acts: dict[Target, Callable[[Fault], None]] = {
            Target.WORKER: self._worker,
            Target.ENGINE: self._engine,
            Target.JANITOR: self._janitor,
            Target.BROKER: self._broker,
            Target.POSTGRES: self._postgres,
            Target.STORE: self._store,
        }
        self._doings.append(self._pools[event.target].submit(acts[event.target], event.fault))

    @property
    def quiet(self) -> bool:
        """Whether no fault is being done."""
        return not self._doings

    def close(self) -> None:
        """End workers and janitor; servers stay with whoever made them."""
        for pool in self._pools.values():
            pool.shutdown(wait=True)
        for process in (*self.workers, self.janitor):
            process.stop(grace_s=0)

    def _worker(self, fault: Fault) -> None:
        worker = self._random.choice(
            self._wait_for(lambda: [worker for worker in self.workers if worker.pid is not None])
        )
        self.kills[Target.WORKER] += 1
        if fault is Fault.STOP:
            worker.signal(signal.SIGTERM)
            return
        self.held.append(worker.shards_held)
        worker.signal(signal.SIGKILL)

    def _engine(self, fault: Fault) -> None:
        engines = self._wait_for(lambda: [worker.engine for worker in self.workers if worker.engine is not None])
        self.kills[Target.ENGINE] += 1
        with contextlib.suppress(psutil.NoSuchProcess):  # its worker was killed in between
            self._random.choice(engines).kill()

    def _wait_for(self, find: Callable[[], list[Found]]) -> list[Found]:
        """What there is to kill; right after a start or a kill there may be nothing for a moment."""
        deadline = time.monotonic() + WAIT_S
        while not (found := find()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"for {WAIT_S:.0f} s there was nothing to kill")
            time.sleep(0.1)
        return found

    def _janitor(self, fault: Fault) -> None:
        self.kills[Target.JANITOR] += 1
        self.janitor.signal(signal.SIGKILL)

    def _broker(self, fault: Fault) -> None:
        self.kills[Target.BROKER] += 1
        if fault is Fault.STOP:
            self.rabbitmq.stop()
        elif fault is Fault.WIPE:
            self.rabbitmq.wipe()
        else:
            self.rabbitmq.kill()
        time.sleep(AWAY_S)
        self.rabbitmq.start()

    def _postgres(self, fault: Fault) -> None:
        self.kills[Target.POSTGRES] += 1
        if fault is Fault.STOP:
            self.postgres.stop()
        else:
            self.postgres.kill()
        time.sleep(AWAY_S)
        self.postgres.start()

    def _store(self, fault: Fault) -> None:
        self.kills[Target.STORE] += 1
        if fault is Fault.REFUSE:
            self.proxy.storm = 0.5
            time.sleep(TROUBLE_S)
            self.proxy.storm = 0.0
        elif fault is Fault.SLOW:
            self.proxy.latency_s = 0.3
            time.sleep(TROUBLE_S)
            self.proxy.latency_s = 0.0
        else:
            self.ceph.gateway.kill()
            time.sleep(AWAY_S)
            self.ceph.start_gateway()
