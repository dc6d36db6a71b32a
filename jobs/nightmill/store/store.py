"""`Store`: each method is one transaction, retried whole when the database asks for it."""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

from sqlalchemy import Connection
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
from nightmill.states import JobStatus, ShardState, Tier
from nightmill.store import job_info, jobs, leases, migrate, open_work, outbox, retry, shards
from nightmill.store.database import Database
from nightmill.store.janitor_lock import janitor_lock
from nightmill.store.leases import LEASE_TTL_S
from nightmill.store.outbox import Publish


class Store:
    """Jobs and shards in SQLite or PostgreSQL. Safe to share between threads; make a new one in a new process.

    Args:
        url: As in Settings.database_url.
        rings: Whether freed shards leave a ring in the outbox, for a relay to send. None: on PostgreSQL; on SQLite
            workers look into the store themselves, and nobody would ever read it.
    """

    def __init__(self, url: str, *, rings: bool | None = None) -> None:
        self._database = Database(url)
        self._rings = not self._database.is_sqlite if rings is None else rings
        self._read = self._database.read
        self._write = self._database.write

    def migrate(self) -> None:
        """Bring the tables up to date; one SELECT when they are. Call it before anything else."""
        migrate.migrate(self._database)

    def revision(self) -> str | None:
        """The migration the store stands at; None when it is empty."""
        return self._read(migrate.current_revision)

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
        source_schema: str | None = None,
    ) -> JobInfo:
        """Insert a job as `queued`; a job with this id or idempotency key is returned instead: compare ids."""
        if not sources or not shards:
            raise ValueError("a job has at least one source and one shard")

        def create(connection: Connection) -> JobInfo:
            if known := jobs.existing(connection, job_id, options.idempotency_key):
                return known
            info = jobs.create(connection, job_id, spec, digest, options, sources, shards, model_digest, source_schema)
            if self._rings:
                outbox.ring_job(connection, job_id)
            return info

        try:
            return self._write(create)
        except IntegrityError:  # the same id or key was inserted between our look and our insert: now it can be seen
            return self._write(create)

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

    def source_schema(self, job_id: str) -> str | None:
        """The schema of all inputs together, as `encode_schema` made it of what was planned; None: not written down."""
        return self._read(lambda c: open_work.source_schema(c, job_id))

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

        def abandon(connection: Connection) -> JobInfo:
            info = jobs.abandon(connection, job_id, error_code, error_message)
            if self._rings:
                outbox.forget(connection, job_id)
            return info

        return self._write(abandon)

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

        def complete(connection: Connection) -> JobInfo:
            info = jobs.complete(connection, job_id, status, error_code, error_message)
            if self._rings:
                outbox.forget(connection, job_id)
            return info

        return self._write(complete)

    def reset_failed_rows(self, job_id: str) -> int:
        """Open a job that has ended again for its rows without an answer; returns how many shards have some.

        NotFoundError; JobStateError when it has not ended, was abandoned, or its output belongs to a newer job.
        """
        generation = self.job(job_id).generation + 1

        def reset(connection: Connection) -> int:
            reopened = retry.reset_failed_rows(connection, job_id, generation)
            if reopened is None:
                return retry.num_reopened(connection, job_id, generation)
            return self._ring(connection, reopened)

        return self._write(reset)

    # Shards

    def available_shards(self, limit: int, job_id: str | None = None, tier: Tier | None = None) -> list[int]:
        """Ids that `claim` would grant now: by tier, then oldest job, then file order."""
        return self._read(lambda c: shards.available_shards(c, limit, job_id, tier))

    def claimable_jobs(self) -> list[tuple[str, Tier]]:
        """Jobs with a shard that `claim` would grant now, by tier, then oldest first."""
        return self._read(open_work.claimable_jobs)

    def job_of_shard(self, shard_id: int) -> str | None:
        """The job of a shard; None when there is no such shard."""
        return self._read(lambda c: open_work.job_of_shard(c, shard_id))

    def pin_model(self, job_id: str, digest: str) -> str | None:
        """Say which content the job's model has, unless that was said before; returns what holds."""
        return self._write(lambda c: open_work.pin_model(c, job_id, digest))

    def refuse_model(self, job_id: str, limit: int, error_code: str, error_message: str) -> bool:
        """A worker cannot load the job's model. The `limit`-th time that nobody has begun the job, it fails: True."""
        return self._write(lambda c: open_work.refuse_model(c, job_id, limit, error_code, error_message))

    def give_up_source(self, job_id: str, source_file: str) -> int:
        """An input is gone or was overwritten: when its shards have together failed as often as one may, none of them
        is tried again. Returns how many that were."""
        return self._write(lambda c: leases.give_up_source(c, job_id, source_file))

    def due_for_closing(self, limit: int = 100, job_id: str | None = None) -> list[tuple[int, ShardState]]:
        """Shards that nobody may run any more, each with the reason to give to `claim_for_close`."""
        return self._read(lambda c: shards.due_for_closing(c, limit, job_id))

    def jobs_to_close(self, limit: int = 1000) -> list[str]:
        """Jobs that have shards which `due_for_closing` would name."""
        return self._read(lambda c: shards.jobs_to_close(c, limit))

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

    def renew(self, lease: ShardLease, ttl_s: float = LEASE_TTL_S) -> bool:
        """Keep a lease whose holder has no progress to tell (a closer); False when it is lost."""
        return self._write(lambda c: leases.renew(c, lease, ttl_s))

    def excuse(self, lease: ShardLease) -> bool:
        """Forget the shard's failures: what it does about them gets on. False when the lease is lost."""
        return self._write(lambda c: leases.excuse(c, lease))

    def release(self, lease: ShardLease, *, failed: bool, progressed: bool) -> bool:
        """Give a lease back; False when it was lost before. `failed` without `progressed` uses up the budget."""

        def release(connection: Connection) -> bool:
            freed = leases.release(connection, lease, failed=failed, progressed=progressed)
            self._ring(connection, [lease.shard_id] if freed else [])
            return freed

        return self._write(release)

    def release_dead(self, worker_ids: Sequence[str]) -> int:
        """Take back the leases of workers known to have ended; returns how many."""
        return self._write(lambda c: self._ring(c, leases.release_dead(c, worker_ids)))

    def expire_leases(self, limit: int = 1000) -> int:
        """Take back up to `limit` leases whose time has run out; returns how many."""
        return self._write(lambda c: self._ring(c, leases.expire_leases(c, limit)))

    # Rings

    def _ring(self, connection: Connection, shard_ids: Sequence[int]) -> int:
        if self._rings and shard_ids:
            outbox.ring(connection, shard_ids)
        return len(shard_ids)

    def relay_outbox(self, publish: Publish, limit: int = 500) -> int:
        """Send up to `limit` rings, urgent ones first; returns how many left the outbox: 0 means that it is empty.

        `publish` runs inside the transaction: when it raises, every ring stays. A ring may be sent twice.
        """
        return self._write(lambda c: outbox.relay(c, publish, limit))

    def ring_stale(self, depths: Mapping[Tier, int], *, after_s: float = 120.0, limit: int = 1000) -> int:
        """Owe another ring for shards rung a while ago, where the tier's queue is shorter than what waits."""
        return self._write(lambda c: outbox.ring_stale(c, depths, after_s, limit)) if self._rings else 0

    def owes_rings(self) -> bool:
        """Whether there is anything in the outbox."""
        return self._read(outbox.owes)

    def num_owed(self) -> int:
        """Rings in the outbox."""
        return self._read(outbox.count)

    def janitor_lock(self) -> AbstractContextManager[bool]:
        """Whether the caller is the one janitor, until it leaves. On SQLite always: its writers wait for each other."""
        return janitor_lock(self._database)
