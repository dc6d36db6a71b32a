"""What a worker of the fleet knows of jobs: their specifications, their contexts, and which ones it leaves alone."""

import logging
import random
import threading
import time
from collections import OrderedDict
from dataclasses import replace

from nightmill.errors import EngineError, FencedError, ModelError, StorageError, StoreError
from nightmill.records import JobInfo, ShardLease
from nightmill.storage import SourceChangedError
from nightmill.store import Store
from nightmill_worker.engine_session import EngineSession
from nightmill_worker.shard import JobContext

log = logging.getLogger(__name__)

MAX_JOBS = 64  # remembered; the ones used last
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0
STORAGE_PATIENCE_S = 900.0  # an object store may be gone for so long before its failures are charged to shards


class JobBook:
    """Job rows, read once: what matters here of a job does not change."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._jobs: OrderedDict[str, JobInfo] = OrderedDict()

    def job(self, job_id: str) -> JobInfo:
        """A job as it stood when it was first asked for; NotFoundError."""
        with self._lock:
            if job_id in self._jobs:
                self._jobs.move_to_end(job_id)
                return self._jobs[job_id]
        job = self._store.job(job_id)
        with self._lock:
            self._jobs[job_id] = job
            while len(self._jobs) > MAX_JOBS:
                self._jobs.popitem(last=False)
        return job


class JobContexts:
    """Contexts of the jobs that run on one session; those used last are kept."""

    def __init__(self, session: EngineSession, store: Store, pauses: "JobPauses", *, lease_ttl_s: float) -> None:
        self._session = session
        self._store = store
        self._pauses = pauses
        self._lease_ttl_s = lease_ttl_s
        self._lock = threading.Lock()  # held while a context is made: two bells of a job make it once
        self._contexts: OrderedDict[str, JobContext] = OrderedDict()

    def get(self, job: JobInfo) -> JobContext:
        """The job's context.

        Raises:
            ValidationError: The job cannot run on this model: not here and nowhere else.
            ModelError: It began with another content of the model: others may go on with it.
            StorageError: Its inputs cannot be read now.
        """
        with self._lock:
            context = self._contexts.get(job.job_id)
            if context is None:
                context = self._make(job)
                self._contexts[job.job_id] = context
                while len(self._contexts) > MAX_JOBS:
                    self._contexts.popitem(last=False)
            self._contexts.move_to_end(job.job_id)
            return context

    def _make(self, job: JobInfo) -> JobContext:
        digest = self._session.model.digest
        pinned = self._store.pin_model(job.job_id, digest) if digest is not None else None
        if pinned != digest:
            raise ModelError(
                f"{job.job_id} began with another content of {job.spec.model.model} ({pinned}) than this worker has"
                f" ({digest})",
                hint="give all workers the same files, or name a --revision",
            )
        context = self._session.job_context(job, self._store, lease_ttl_s=self._lease_ttl_s)
        # What the store can do is asked now, beside the first rows, so that no part waits for the answer.
        threading.Thread(target=_ask, args=(context,), name="ask-store", daemon=True).start()
        pauses, job_id = self._pauses, job.job_id
        return replace(
            context,
            retries_commit=True,
            charges=lambda error: pauses.charges(job_id, error),
            gives_up_source=self._give_up_source,
        )

    def _give_up_source(self, lease: ShardLease) -> None:
        given_up = self._store.give_up_source(lease.job_id, lease.range.source_file)
        if given_up:
            log.error("%s: %s is given up, %d shards end without it", lease.job_id, lease.range.source_file, given_up)


def _ask(context: JobContext) -> None:
    try:
        context.storage.creates_atomically(context.folder.root)
    except StorageError as error:
        log.info("asking the store of %s what it can do: %s", context.job.job_id, error)  # the first write asks again


class JobPauses:
    """Jobs whose shards have just failed here wait, longer each time, so that a broken one does not spin."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failing: dict[str, tuple[float, int, float]] = {}  # job → since, failures in a row, paused until

    def charges(self, job_id: str, error: BaseException) -> bool:
        """Whether a failed attempt uses up its shard's budget: a store that is away is nobody's fault."""
        if isinstance(error, EngineError | FencedError | StoreError) or not isinstance(error, Exception):
            return False
        if isinstance(error, SourceChangedError):
            return True
        if isinstance(error, StorageError):
            with self._lock:
                since = self._failing.get(job_id, (time.monotonic(), 0, 0.0))[0]
            return time.monotonic() - since > STORAGE_PATIENCE_S
        return True

    def failed(self, job_id: str) -> float:
        """A shard of the job failed here; returns for how many seconds the job is left alone."""
        with self._lock:
            now = time.monotonic()
            since, count, until = self._failing.get(job_id, (now, 0, 0.0))
            if now < until:
                return until - now  # a neighbour of the one that began this pause
            pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0**count) * random.uniform(0.8, 1.2)
            self._failing[job_id] = (since, count + 1, now + pause_s)
            return pause_s

    def succeeded(self, job_id: str) -> None:
        """A shard of the job was committed here."""
        with self._lock:
            self._failing.pop(job_id, None)

    def is_paused(self, job_id: str) -> bool:
        """Whether to leave the job alone now."""
        with self._lock:
            return time.monotonic() < self._failing.get(job_id, (0.0, 0, 0.0))[2]
