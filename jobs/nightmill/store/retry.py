"""Retry: a job that has ended is opened again for its rows without an answer. Its parts stand until replaced."""

from typing import Any

from sqlalchemy import Connection, func, select, update

from nightmill.errors import JobStateError
from nightmill.records import JobInfo
from nightmill.schema import jobs, shards
from nightmill.states import OPEN_SHARD, TERMINAL_JOB, TERMINAL_SHARD, JobStatus, ShardState
from nightmill.store import job_info
from nightmill.store.clock import now

_unanswered = shards.c.rows_failed + shards.c.rows_cancelled
_reopened: dict[str, Any] = {
    "state": ShardState.AVAILABLE,
    "num_failures": 0,
    "rows_durable": shards.c.rows_completed,
    "rows_durable_at_claim": shards.c.rows_completed,
    "rows_failed": 0,
    "rows_cancelled": 0,
    "rows_resumed": 0,
    "rows_recomputed": 0,
    "error_codes": None,
    "rung_at": now(),
    "num_rings": 0,
}


def reset_failed_rows(connection: Connection, job_id: str, generation: int) -> list[int] | None:
    """Open the job's next generation; returns the shards that have rows to run again.

    With none, nothing is changed. Shards that were stopped although each row has its answer become committed.
    None: the generation stands open already. The answer to an earlier COMMIT was lost, or somebody else has asked for
    the same; that is as good.

    Args:
        connection: In a transaction.
        job_id: Of a job that has ended.
        generation: The one to open: one more than the job's as it was read before.

    Raises:
        NotFoundError: there is no such job.
        JobStateError: it has not ended, its shards were left open, or its output belongs to a newer job.
    """
    # Of two at once the second waits here, and then reads what the first has done.
    connection.execute(select(jobs.c.job_id).where(jobs.c.job_id == job_id).with_for_update())
    job = job_info.job(connection, job_id)
    mine = shards.c.job_id == job_id
    if job.generation == generation:
        return None
    _require_retryable(connection, job)
    if not job.rows.failed + job.rows.cancelled:
        return []
    _open_job(connection, job_id, generation)
    connection.execute(
        update(shards)
        .where(mine, shards.c.state.in_(TERMINAL_SHARD), _unanswered == 0)
        .values(state=ShardState.COMMITTED)
    )
    reopened = (
        update(shards)
        .where(mine, shards.c.state.in_(TERMINAL_SHARD), _unanswered > 0)
        .values(generation=generation, **_reopened)
        .returning(shards.c.shard_id)
    )
    return list(connection.scalars(reopened))


def num_reopened(connection: Connection, job_id: str, generation: int) -> int:
    """Shards that this generation has opened."""
    theirs = (shards.c.job_id == job_id, shards.c.generation == generation)
    return connection.scalars(select(func.count()).select_from(shards).where(*theirs)).one()


def _require_retryable(connection: Connection, job: JobInfo) -> None:
    if job.status not in TERMINAL_JOB:
        raise JobStateError(f"job {job.job_id} is {job.status}: only a job that has ended can be retried")
    if any(job.num_shards_by_state.get(state) for state in OPEN_SHARD):
        raise JobStateError(
            f"job {job.job_id} ended without writing its output ({job.error_message}): there is nothing to retry",
            hint="submit it again",
        )
    owner = job_info.for_output(connection, job.spec.output)
    if owner is not None and owner.job_id != job.job_id:
        raise JobStateError(f"the output {job.spec.output} belongs to a newer job, {owner.job_id}")


def _open_job(connection: Connection, job_id: str, generation: int) -> None:
    connection.execute(
        update(jobs)
        .where(jobs.c.job_id == job_id, jobs.c.status.in_(TERMINAL_JOB))
        .values(
            status=JobStatus.QUEUED,
            generation=generation,
            num_refusals=0,
            error_code=None,
            error_message=None,
            expires_at=None,
            finished_at=None,
        )
    )
