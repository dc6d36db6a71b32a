"""Closing shards that nobody may run any more, and ending jobs whose shards have all ended. Many may do it at once."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nightmill.errors import FencedError, StoreError
from nightmill.records import JobInfo, ShardLease, ShardResult
from nightmill.store import HEARTBEAT_S, LEASE_TTL_S, Store

log = logging.getLogger(__name__)

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
    """Close up to `limit` shards that may not run any more; returns how many. Call again until it returns 0."""
    jobs: dict[str, JobInfo] = {}
    num_closed = 0
    for shard_id, reason in store.due_for_closing(limit, job_id):
        lease = store.claim_for_close(shard_id, reason, worker_id, ttl_s)
        if lease is None:
            continue  # another closer has it
        if lease.job_id not in jobs:
            jobs[lease.job_id] = store.job(lease.job_id)
        try:
            with _kept(store, lease, ttl_s):
                result = close_part(lease, jobs[lease.job_id])
            store.commit_shard(lease, result)
        except FencedError:
            continue  # we were slow, and another closer has done it
        except BaseException:
            store.release(lease, failed=False, progressed=False)
            raise
        num_closed += 1
    return num_closed


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
