"""`Store`: each method is one transaction, retried whole when the database asks for it."""

import secrets
from collections.abc import Iterable, Mapping, Sequence

from sqlalchemy.exc import IntegrityError

from nightmill.records import (
    CommittedShard,
    JobInfo,
    JobOptions,
    JobSpec,
    ShardLease,
    ShardProgress,
    ShardRange,
    ShardResult,
    SourceFile,
)
from nightmill.states import JobStatus, ShardState
from nightmill.store import job_info, jobs, leases, migrate, shards
from nightmill.store.database import Database
from nightmill.store.leases import LEASE_TTL_S


class Store:
    """Jobs and shards in SQLite or PostgreSQL. Safe to share between threads; make a new one in a new process."""

    def __init__(self, url: str) -> None:
        self._database = Database(url)
        self._read = self._database.read
        self._write = self._database.write

    def migrate(self) -> None:
        """Bring the tables up to date; one SELECT when they are. Call it before anything else."""
        migrate.migrate(self._database)

    def close(self) -> None:
        """Close all connections."""
        self._database.close()

    # Jobs

    def create_job(
        self,
        job_id: str,
        spec: JobSpec,
        digest: str,
        options: JobOptions,
        sources: Sequence[SourceFile],
        shards: Sequence[ShardRange],
        *,
        model_digest: str | None = None,
    ) -> JobInfo:
        """Insert a job as `queued`; a job with this id or idempotency key is returned instead: compare ids."""
        if not sources or not shards:
            raise ValueError("a job has at least one source and one shard")

        def create() -> JobInfo:
            return self._write(lambda c: jobs.create(c, job_id, spec, digest, options, sources, shards, model_digest))

        try:
            return create()
        except IntegrityError:  # the same id or key was inserted between our look and our insert: now it can be seen
            return create()

    def job(self, job_id: str) -> JobInfo:
        """What is known of a job; NotFoundError."""
        return self._read(lambda c: job_info.job(c, job_id))

    def jobs(self, limit: int = 100, status: JobStatus | None = None) -> list[JobInfo]:
        """Jobs, newest first."""
        return self._read(lambda c: job_info.newest(c, limit, status))

    def job_for_output(self, output: str) -> JobInfo | None:
        """The newest job that writes to this location."""
        return self._read(lambda c: job_info.for_output(c, output))

    def job_for_key(self, idempotency_key: str) -> JobInfo | None:
        """The job that was submitted with this idempotency key."""
        return self._read(lambda c: job_info.for_key(c, idempotency_key))

    def sources(self, job_id: str) -> list[SourceFile]:
        """The input objects as they were planned."""
        return self._read(lambda c: job_info.source_files(c, job_id))

    def has_live_leases(self, job_id: str) -> bool:
        """True while somebody works on the job."""
        return self._read(lambda c: jobs.has_live_leases(c, job_id))

    def stop_requested(self, job_ids: Iterable[str]) -> frozenset[str]:
        """Those of the jobs whose work must stop now: cancelled, failing, expired, ended or gone."""
        wanted = frozenset(job_ids)
        return self._read(lambda c: jobs.stop_requested(c, wanted))

    def cancel(self, job_id: str) -> JobInfo:
        """Ask a job to stop; idempotent. JobStateError when it is finalizing or ended otherwise."""
        return self._write(lambda c: jobs.cancel(c, job_id))

    def fail_job(self, job_id: str, error_code: str, error_message: str) -> JobInfo:
        """Stop a job for an error of its own: shards are closed, what is finished is kept, it ends `failed`."""
        return self._write(lambda c: jobs.fail(c, job_id, error_code, error_message))

    def abandon_job(self, job_id: str, error_code: str, error_message: str) -> JobInfo:
        """End a job at once, its shards left open: its output belongs to another job now."""
        return self._write(lambda c: jobs.abandon(c, job_id, error_code, error_message))

    def finalizable_jobs(self, limit: int = 100) -> list[str]:
        """Jobs whose shards are all terminal and that have not ended."""
        return self._read(lambda c: jobs.finalizable(c, limit))

    def begin_finalize(self, job_id: str) -> bool:
        """True: every shard is terminal, write the manifest, then `complete_job`. Several may be told so."""
        return self._write(lambda c: jobs.begin_finalize(c, job_id))

    def complete_job(
        self,
        job_id: str,
        status: JobStatus | None = None,
        error_code: str | None = None,
        error_message: str | None = None,
    ) -> JobInfo:
        """End a job; without a status its shards tell which. Idempotent; JobStateError on an illegal move."""
        return self._write(lambda c: jobs.complete(c, job_id, status, error_code, error_message))

    # Shards

    def available_shards(self, limit: int, job_id: str | None = None) -> list[int]:
        """Ids that `claim` would grant now: by tier, then oldest job, then file order."""
        return self._read(lambda c: shards.available_shards(c, limit, job_id))

    def due_for_closing(self, limit: int = 100, job_id: str | None = None) -> list[tuple[int, ShardState]]:
        """Shards that nobody may run any more, each with the reason to give to `claim_for_close`."""
        return self._read(lambda c: shards.due_for_closing(c, limit, job_id))

    def shard_results(self, job_id: str) -> list[CommittedShard]:
        """The terminal shards of a job, in file order."""
        return self._read(lambda c: shards.shard_results(c, job_id))

    def commit_shard(self, lease: ShardLease, result: ShardResult) -> None:
        """Make the shard terminal: `committed`, or what the closer's lease says. FencedError: the lease was lost."""
        self._write(lambda c: shards.commit(c, lease, result))

    # Leases

    def claim(self, shard_id: int, worker_id: str, ttl_s: float = LEASE_TTL_S) -> ShardLease | None:
        """Lease a shard to compute it; None when it is not available or may not run."""
        token = secrets.token_hex(16)
        return self._write(lambda c: leases.claim(c, shard_id, worker_id, ttl_s, token))

    def claim_for_close(
        self, shard_id: int, reason: ShardState, worker_id: str, ttl_s: float = LEASE_TTL_S
    ) -> ShardLease | None:
        """Lease a shard to write its part without computing more; its commit lands in `reason`."""
        token = secrets.token_hex(16)
        return self._write(lambda c: leases.claim(c, shard_id, worker_id, ttl_s, token, reason))

    def heartbeat(
        self, worker_id: str, progress: Mapping[int, ShardProgress], ttl_s: float = LEASE_TTL_S
    ) -> frozenset[int]:
        """Renew the leases of these shards; returns the ids that are lost: drop their work, write nothing."""
        return self._write(lambda c: leases.heartbeat(c, worker_id, progress, ttl_s))

    def release(self, lease: ShardLease, *, failed: bool, progressed: bool) -> bool:
        """Give a lease back; False when it was lost before. `failed` without `progressed` uses up the budget."""
        return self._write(lambda c: leases.release(c, lease, failed=failed, progressed=progressed))

    def release_dead(self, worker_ids: Sequence[str]) -> int:
        """Take back the leases of workers known to have ended; returns how many."""
        return self._write(lambda c: leases.release_dead(c, worker_ids))

    def expire_leases(self) -> int:
        """Take back the leases whose time has run out; returns how many."""
        return self._write(leases.expire_leases)
