"""Closing shards that nobody may run any more, and ending jobs whose shards have all ended. Many may do it at once."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Generic, TypeVar

from nightmill.errors import FencedError, StoreError
from nightmill.records import JobInfo, ShardLease, ShardResult
from nightmill.states import ShardState
from nightmill.store import HEARTBEAT_S, LEASE_TTL_S, Store

log = logging.getLogger(__name__)

MAX_CLOSERS = 16  # shards, or jobs, that end at once: each holds a row group of its part in memory

Item = TypeVar("Item")
Result = TypeVar("Result")
ClosePart = Callable[[ShardLease, JobInfo], ShardResult]
"""Writes a shard's part without computing: checkpointed rows, and error rows (by `lease.close_as`) for the rest."""
Finalize = Callable[[JobInfo], None]
"""Writes the manifest and `_SUCCESS`, removes checkpoints. Idempotent: it may run more than once, and at once."""


def close_due(
    store: Store,
    worker_id: str,
    close_part: ClosePart,
    *,
    job_id: str | None = None,
    limit: int = 100,
    ttl_s: float = LEASE_TTL_S,
) -> int:
    """Close up to `limit` shards that may not run any more; returns how many. Call again until it returns 0.

    Several at once: each is a row of waits for a network. After an error no further one is begun; those that were begun
    are brought to their end, and then the first error is raised.
    """
    jobs = OnceRead(store.job)

    def close(shard: tuple[int, ShardState]) -> bool:
        return close_shard(store, worker_id, lambda lease: close_part(lease, jobs.get(lease.job_id)), *shard, ttl_s)

    return sum(side_by_side(close, store.due_for_closing(limit, job_id)))


def close_shard(
    store: Store,
    worker_id: str,
    write: Callable[[ShardLease], ShardResult],
    shard_id: int,
    reason: ShardState,
    ttl_s: float = LEASE_TTL_S,
) -> bool:
    """Close one shard that `due_for_closing` has named; False when somebody else has it, or has done it."""
    lease = store.claim_for_close(shard_id, reason, worker_id, ttl_s)
    if lease is None:
        return False  # another closer has it
    try:
        with _kept(store, lease, ttl_s):
            result = write(lease)
        store.commit_shard(lease, result)
    except FencedError:
        return False  # we were slow, and another closer has done it
    except BaseException:
        store.release(lease, failed=False, progressed=False)
        raise
    return True


class OnceRead(Generic[Result]):
    """What is known of a job, read once for all its shards. Safe to share between threads."""

    def __init__(self, read: Callable[[str], Result]) -> None:
        self._read = read
        self._found: dict[str, Result] = {}
        self._lock = threading.Lock()

    def get(self, job_id: str) -> Result:
        """Of this job."""
        with self._lock:
            if job_id not in self._found:
                self._found[job_id] = self._read(job_id)
            return self._found[job_id]


def side_by_side(
    action: Callable[[Item], Result], items: Sequence[Item], *, threads: int = MAX_CLOSERS
) -> list[Result]:
    """`action` of each item, several at once; results in their order. The first error ends it, and is raised."""
    if len(items) < 2:
        return [action(item) for item in items]
    pool = ThreadPoolExecutor(min(threads, len(items)), thread_name_prefix="closer")
    try:
        running = [pool.submit(action, item) for item in items]
        wait(running, return_when=FIRST_EXCEPTION)
    finally:
        pool.shutdown(cancel_futures=True)
    for future in running:
        if not future.cancelled() and (error := future.exception()) is not None:
            raise error
    return [future.result() for future in running]


@contextmanager
def _kept(store: Store, lease: ShardLease, ttl_s: float) -> Iterator[None]:
    """Renew the lease while its part is written: a large one over a slow network takes longer than a lease lives."""
    done = threading.Event()

    def renew() -> None:
        while not done.wait(min(HEARTBEAT_S, ttl_s / 4)):
            try:
                if not store.renew(lease, ttl_s):
                    return  # lost: the commit will tell
            except StoreError as error:
                log.warning("the lease of shard %d could not be renewed: %s", lease.shard_id, error)

    thread = threading.Thread(target=renew, name="closer-lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def finalize_due(store: Store, finalize: Finalize, *, limit: int = 100) -> list[str]:
    """End every job whose shards are all terminal; returns their ids. Picks up where a crash in here left off."""
    return [job_id for job_id in store.finalizable_jobs(limit) if end_job(store, job_id, finalize)]


def end_job(store: Store, job_id: str, finalize: Finalize) -> bool:
    """Write the manifest of a job whose shards are all terminal, and end it; False when they are not."""
    if not store.begin_finalize(job_id):
        return False
    finalize(store.job(job_id))
    store.complete_job(job_id)
    return True
