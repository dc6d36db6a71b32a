"""The janitor: takes back what the dead held, closes what may not run, ends jobs. Many may run at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nightmill.errors import FencedError
from nightmill.records import JobInfo, ShardLease, ShardResult
from nightmill.store import LEASE_TTL_S, Store
from nightmill.worker_lock import sweep_dead

ClosePart = Callable[[ShardLease, JobInfo], ShardResult]
"""Writes a shard's part without computing: checkpointed rows, and error rows (by `lease.close_as`) for the rest."""
Finalize = Callable[[JobInfo], None]
"""Writes the manifest and `_SUCCESS`, removes checkpoints. Idempotent: it may run more than once, and at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Leases taken back."""

    num_dead: int  # of workers on this machine that have ended
    num_expired: int


def sweep(store: Store, workers_dir: Path) -> Sweep:
    """Take back the leases of dead workers at once, and of silent ones when their time has run out."""
    num_dead = 0

    def bury(worker_ids: Sequence[str]) -> None:
        nonlocal num_dead
        num_dead = store.release_dead(worker_ids)

    sweep_dead(workers_dir, bury)
    return Sweep(num_dead=num_dead, num_expired=store.expire_leases())


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
            store.commit_shard(lease, close_part(lease, jobs[lease.job_id]))
        except FencedError:
            continue  # we were slow, and another closer has done it
        except BaseException:
            store.release(lease, failed=False, progressed=False)
            raise
        num_closed += 1
    return num_closed


def finalize_due(store: Store, finalize: Finalize, *, limit: int = 100) -> list[str]:
    """End every job whose shards are all terminal; returns their ids. Picks up where a crash in here left off."""
    ended = []
    for job_id in store.finalizable_jobs(limit):
        if store.begin_finalize(job_id):
            finalize(store.job(job_id))
            store.complete_job(job_id)
            ended.append(job_id)
    return ended
