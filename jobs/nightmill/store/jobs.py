"""Jobs: create, and move along JOB_MOVES."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, exists, insert, literal, or_, select, update

from nightmill.canonical import encode
from nightmill.errors import JobStateError
from nightmill.records import JobInfo, JobOptions, JobSpec, ShardRange, SourceFile
from nightmill.schema import in_state, jobs, shards, sources
from nightmill.states import JOB_MOVES, TERMINAL_JOB, JobStatus, ShardState
from nightmill.store.clock import now
from nightmill.store.job_info import job
from nightmill.store.json_rows import json_rows, number, string
from nightmill.store.leases import LIVE_JOB, has_available, job_may_run

_CHUNK = 20_000  # shards in one statement: 2 MB of JSON
_CANCELLABLE = tuple(status for status, moves in JOB_MOVES.items() if JobStatus.CANCELLING in moves)
# Two questions, each answered by the first row of an index.
_unfinished = or_(has_available(), exists().where(shards.c.job_id == jobs.c.job_id, in_state(ShardState.LEASED)))


def existing(connection: Connection, job_id: str, idempotency_key: str | None) -> JobInfo | None:
    """The job that has this id or this idempotency key."""
    same = jobs.c.job_id == job_id
    if idempotency_key is not None:
        same = or_(same, jobs.c.idempotency_key == idempotency_key)
    known = connection.scalar(select(jobs.c.job_id).where(same))
    return None if known is None else job(connection, known)


def create(
    connection: Connection,
    job_id: str,
    spec: JobSpec,
    digest: str,
    options: JobOptions,
    source_files: Sequence[SourceFile],
    ranges: Sequence[ShardRange],
    model_digest: str | None,
    source_schema: str | None,
) -> JobInfo:
    """Insert a job with its sources and shards, all or nothing, as `queued`."""
    connection.execute(
        insert(jobs).values(
            job_id=job_id,
            status=JobStatus.QUEUED,
            tier=options.tier,
            spec=encode(spec),
            spec_digest=digest,
            model_digest=model_digest,
            source_schema=source_schema,
            options=encode(options),
            output=spec.output,
            idempotency_key=options.idempotency_key,
            max_failures=options.max_failures,
            created_at=now(),
            expires_at=None if options.expires_in_s is None else now(options.expires_in_s),
        )
    )
    connection.execute(
        insert(sources),
        [
            {"job_id": job_id, "position": i, "uri": s.uri, "num_rows": s.num_rows, "size_bytes": s.size_bytes}
            | {"etag": s.etag}
            for i, s in enumerate(source_files)
        ],
    )
    for begin in range(0, len(ranges), _CHUNK):
        _insert_shards(connection, job_id, ranges[begin : begin + _CHUNK])
    return job(connection, job_id)


def _insert_shards(connection: Connection, job_id: str, ranges: Sequence[ShardRange]) -> None:
    """One statement for all: a row at a time, ten thousand of them take seconds."""
    rows = json_rows(
        connection,
        json.dumps(
            [{"i": r.index, "file": r.source_file, "start": r.row_start, "end": r.row_end} for r in ranges],
            separators=(",", ":"),
        ),
    )
    values = {
        "job_id": literal(job_id),
        "shard_index": number(rows, "i"),
        "source_file": string(rows, "file"),
        "row_start": number(rows, "start"),
        "row_end": number(rows, "end"),
        "state": literal(ShardState.AVAILABLE.value),
        "rung_at": now(),
    }
    query = select(*values.values()).order_by(number(rows, "i"))
    connection.execute(insert(shards).from_select(list(values), query))


def has_live_leases(connection: Connection, job_id: str) -> bool:
    """True while somebody holds a shard of the job by a lease that has not run out."""
    held = and_(shards.c.job_id == job_id, in_state(ShardState.LEASED), shards.c.lease_expires_at > now())
    return bool(connection.scalar(select(exists().where(held))))


def stop_requested(connection: Connection, job_ids: Iterable[str]) -> frozenset[str]:
    """Those of the jobs whose work must stop: cancelled, failing, expired, ended or gone."""
    wanted = frozenset(job_ids)
    may_go_on = and_(jobs.c.job_id.in_(wanted), job_may_run())
    return wanted - frozenset(connection.scalars(select(jobs.c.job_id).where(may_go_on)))


def cancel(connection: Connection, job_id: str) -> JobInfo:
    """Ask a job to stop. Asking again changes nothing.

    Raises:
        NotFoundError: there is none with this id.
        JobStateError: it is finalizing, or ended otherwise.
    """
    moved = _move(connection, job_id, JobStatus.CANCELLING, jobs.c.status.in_(_CANCELLABLE))
    info = job(connection, job_id)
    if not moved and info.status not in (JobStatus.CANCELLING, JobStatus.CANCELLED):
        raise JobStateError(f"job {job_id} is {info.status} already and cannot be cancelled")
    return info


def fail(connection: Connection, job_id: str, error_code: str, error_message: str) -> JobInfo:
    """Let a job fail: nothing of it runs any more, its open shards are closed, then it ends as `failed`.

    The first reason stays. A job that is cancelling, finalizing or ended is left as it is.
    """
    connection.execute(
        update(jobs)
        .where(jobs.c.job_id == job_id, jobs.c.status.in_(LIVE_JOB), jobs.c.error_code.is_(None))
        .values(error_code=error_code, error_message=error_message)
    )
    return job(connection, job_id)


def abandon(connection: Connection, job_id: str, error_code: str, error_message: str) -> JobInfo:
    """End a job whose output is no longer its own, without closing its shards: there is no place for their parts."""
    reason = {"error_code": error_code, "error_message": error_message, "finished_at": now()}
    if not _move(connection, job_id, JobStatus.CANCELLED, jobs.c.status == JobStatus.CANCELLING, **reason):
        _move(connection, job_id, JobStatus.FAILED, jobs.c.status.not_in(TERMINAL_JOB), **reason)
    return job(connection, job_id)


def finalizable(connection: Connection, limit: int) -> list[str]:
    """Jobs whose shards are all terminal and that have not ended, oldest first."""
    waiting = jobs.c.status.in_((JobStatus.IN_PROGRESS, JobStatus.CANCELLING, JobStatus.FINALIZING))
    query = select(jobs.c.job_id).where(waiting, ~_unfinished).order_by(jobs.c.created_at, jobs.c.job_id)
    return list(connection.scalars(query.limit(limit)))


def begin_finalize(connection: Connection, job_id: str) -> bool:
    """True when every shard is terminal and the job has not ended: write the manifest, then `complete`.

    More than one caller may be told so, also after a crash in between: what follows must be idempotent.
    """
    _move(connection, job_id, JobStatus.FINALIZING, and_(jobs.c.status == JobStatus.IN_PROGRESS, ~_unfinished))
    ready = and_(jobs.c.job_id == job_id, jobs.c.status.in_((JobStatus.FINALIZING, JobStatus.CANCELLING)), ~_unfinished)
    return connection.scalar(select(jobs.c.job_id).where(ready)) is not None


def complete(
    connection: Connection,
    job_id: str,
    status: JobStatus | None,
    error_code: str | None,
    error_message: str | None,
) -> JobInfo:
    """End a job; again with the same status changes nothing. Without a status its shards tell which.

    Raises:
        JobStateError: the move is not legal from where the job is, or a shard is not terminal yet.
    """
    before = job(connection, job_id)
    target = status or _final_status(before)
    if target not in TERMINAL_JOB:
        raise ValueError(f"{target} does not end a job")
    if before.status == target:
        return before
    legal = jobs.c.status.in_([s for s in JobStatus if target in JOB_MOVES[s]])
    ready = legal if target is JobStatus.FAILED else and_(legal, ~_unfinished)
    if target is JobStatus.FAILED and before.error_code is None and error_code is None:
        error_code, error_message = "every_shard_discarded", "no shard could be computed: see the errors of its rows"
    values: dict[str, Any] = {"finished_at": now()}
    if before.error_code is None:
        values |= {"error_code": error_code, "error_message": error_message}
    if not _move(connection, job_id, target, ready, **values):
        raise JobStateError(f"job {job_id} is {before.status} and cannot become {target}")
    return job(connection, job_id)


def _final_status(info: JobInfo) -> JobStatus:
    if info.status in TERMINAL_JOB:
        return info.status
    if info.status is JobStatus.CANCELLING:
        return JobStatus.CANCELLED
    states = info.num_shards_by_state
    if info.error_code is not None or states.get(ShardState.DISCARDED, 0) == info.num_shards:
        return JobStatus.FAILED
    return JobStatus.EXPIRED if states.get(ShardState.EXPIRED, 0) else JobStatus.COMPLETED


def _move(
    connection: Connection, job_id: str, status: JobStatus, condition: ColumnElement[bool], **values: Any
) -> bool:
    moved = connection.execute(
        update(jobs).where(jobs.c.job_id == job_id, condition).values(status=status, **values).returning(jobs.c.job_id)
    )
    return moved.first() is not None
