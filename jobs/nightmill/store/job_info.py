"""What is known of jobs: each answer is added up from the shards, so no counter can drift from them."""

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, func, select

from nightmill.canonical import decode
from nightmill.errors import NotFoundError
from nightmill.records import JobInfo, JobOptions, JobSpec, RowCounts, SourceFile, TokenCounts
from nightmill.schema import jobs, shards, sources
from nightmill.states import TERMINAL_JOB, JobStatus, ShardState

_SUMS = (
    *("rows_completed", "rows_failed", "rows_cancelled", "rows_running", "rows_resumed", "rows_recomputed"),
    *("prompt_tokens", "completion_tokens", "cached_tokens"),
)


def job(connection: Connection, job_id: str) -> JobInfo:
    """What is known of a job.

    Raises:
        NotFoundError: there is none with this id.
    """
    found = _infos(connection, jobs.c.job_id == job_id, limit=1)
    if not found:
        raise NotFoundError(f"no job {job_id}", hint="nightmill list shows the jobs of this store")
    return found[0]


def newest(connection: Connection, limit: int, status: JobStatus | None) -> list[JobInfo]:
    """Jobs, newest first."""
    return _infos(connection, None if status is None else jobs.c.status == status, limit)


def for_output(connection: Connection, output: str) -> JobInfo | None:
    """The newest job that writes to this location."""
    return next(iter(_infos(connection, jobs.c.output == output, limit=1)), None)


def for_key(connection: Connection, idempotency_key: str) -> JobInfo | None:
    """The job that was submitted with this idempotency key."""
    return next(iter(_infos(connection, jobs.c.idempotency_key == idempotency_key, limit=1)), None)


def source_files(connection: Connection, job_id: str) -> list[SourceFile]:
    """The input objects as they were planned."""
    query = select(sources).where(sources.c.job_id == job_id).order_by(sources.c.position)
    return [
        SourceFile(uri=row.uri, num_rows=row.num_rows, size_bytes=row.size_bytes, etag=row.etag)
        for row in connection.execute(query)
    ]


def _infos(connection: Connection, condition: ColumnElement[bool] | None, limit: int) -> list[JobInfo]:
    query = select(jobs).order_by(jobs.c.created_at.desc(), jobs.c.job_id.desc()).limit(limit)
    rows = connection.execute(query if condition is None else query.where(condition)).all()
    ids = [row.job_id for row in rows]
    by_job: dict[str, list[Row[Any]]] = defaultdict(list)
    for row in connection.execute(
        select(
            shards.c.job_id,
            shards.c.state,
            func.count().label("num_shards"),
            func.sum(shards.c.row_end - shards.c.row_start).label("rows"),
            func.max(shards.c.progress_at).label("progress_at"),
            *(func.sum(shards.c[name]).label(name) for name in _SUMS),
        )
        .where(shards.c.job_id.in_(ids))
        .group_by(shards.c.job_id, shards.c.state)
    ):
        by_job[row.job_id].append(row)
    codes: dict[str, Counter[str]] = defaultdict(Counter)
    for row in connection.execute(
        select(shards.c.job_id, shards.c.error_codes).where(shards.c.job_id.in_(ids), shards.c.error_codes.is_not(None))
    ):
        codes[row.job_id].update(json.loads(row.error_codes))
    return [_info(row, by_job[row.job_id], codes[row.job_id]) for row in rows]


def _info(row: Row[Any], states: Sequence[Row[Any]], codes: Counter[str]) -> JobInfo:
    sums = {name: sum(int(getattr(state, name)) for state in states) for name in _SUMS}
    total = sum(int(state.rows) for state in states)
    status = JobStatus(row.status)
    # Of a job that ended before its shards did, the rows without an answer never ran.
    unanswered = total - sums["rows_completed"] - sums["rows_failed"] - sums["rows_cancelled"]
    return JobInfo(
        job_id=row.job_id,
        status=status,
        spec_digest=row.spec_digest,
        spec=decode(JobSpec, row.spec),
        options=decode(JobOptions, row.options),
        rows=RowCounts(
            total=total,
            completed=sums["rows_completed"],
            failed=sums["rows_failed"],
            cancelled=sums["rows_cancelled"] + (unanswered if status in TERMINAL_JOB else 0),
        ),
        tokens=TokenCounts(
            prompt=sums["prompt_tokens"], completion=sums["completion_tokens"], cached=sums["cached_tokens"]
        ),
        num_shards=sum(state.num_shards for state in states),
        num_shards_by_state={ShardState(state.state): state.num_shards for state in states},
        error_codes=dict(sorted(codes.items())),
        error_code=row.error_code,
        error_message=row.error_message,
        model_digest=row.model_digest,
        rows_running=sums["rows_running"],
        rows_resumed=sums["rows_resumed"],
        rows_recomputed=sums["rows_recomputed"],
        generation=row.generation,
        created_at=row.created_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
        last_progress_at=max((s.progress_at for s in states if s.progress_at is not None), default=None),
    )
