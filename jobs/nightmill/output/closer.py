"""The end of shards that nobody will compute any more, and of jobs whose shards have all ended. Needs no model."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pyarrow as pa

from nightmill.closing import OnceRead, close_due
from nightmill.errors import RowErrorCode, StorageError
from nightmill.output.checkpoint import read_checkpoints
from nightmill.output.folder import OutputFolder
from nightmill.output.manifest import finalize_output
from nightmill.output.part import PartInfo, replace_part, write_part
from nightmill.output.part_rows import Unanswered
from nightmill.reader import read_range
from nightmill.records import JobInfo, ShardLease, ShardResult
from nightmill.rows import job_source_schema
from nightmill.rows.schema import decode_schema
from nightmill.states import TERMINAL_JOB, JobStatus, ShardState
from nightmill.storage import SourceChangedError, Storage, is_source_lost, open_storage, pinned
from nightmill.store import Store

log = logging.getLogger(__name__)

_REASONS = {
    ShardState.CANCELLED: Unanswered(code=RowErrorCode.BATCH_CANCELLED, message="the job was stopped before this row"),
    ShardState.EXPIRED: Unanswered(code=RowErrorCode.BATCH_EXPIRED, message="the job expired before this row ran"),
    ShardState.DISCARDED: Unanswered(
        code=RowErrorCode.QUARANTINED,
        message="attempts at this row and its neighbours failed too often: the process died, or an error came",
    ),
}


GIVE_UP_AFTER = 2  # failed tries of a job's closing: then what cannot be read is taken for lost


def wind_up(store: Store, job_id: str, worker_id: str, model_name: str, *, gives_up: bool = False) -> bool:
    """Write the parts of shards that may not run any more; end the job when every part stands. True: it has ended.

    Safe to run again after a crash, and by several at once. `gives_up`: also without an input that cannot be read.
    """
    closer = PartCloser(store)

    def close(lease: ShardLease, job: JobInfo) -> ShardResult:
        return closer.close(lease, model_name=model_name, gives_up=gives_up)

    while close_due(store, worker_id, close, job_id=job_id):
        pass
    if store.begin_finalize(job_id):
        finalize(store, store.job(job_id))
        store.complete_job(job_id)
    return store.job(job_id).status in TERMINAL_JOB


@dataclass(frozen=True, slots=True)
class _Owed:
    """What all shards of a job share."""

    job: JobInfo
    schema: pa.Schema
    sources: Storage


class PartCloser:
    """Writes the parts of shards leased for closing, several at once; what belongs to a job is read once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._owed: OnceRead[_Owed] = OnceRead(self._look)

    def close(self, lease: ShardLease, *, model_name: str | None = None, gives_up: bool = False) -> ShardResult:
        """Write a shard's part: checkpointed rows, and error rows by `lease.close_as` for the rest.

        An input that is gone or was overwritten is done without: its columns are null.

        Args:
            lease: Of a closer.
            model_name: Value of the `model` column; None: as the job has it.
            gives_up: Do without an input that cannot be read for any other reason, too.
        """
        owed = self._owed.get(lease.job_id)
        try:
            return self._write(lease, owed, model_name, None)
        except StorageError as error:
            lost = _lost_source(lease, owed, error, gives_up=gives_up)
            if lost is None:
                raise
            log.warning("shard %d of %s ends without its input: %s", lease.range.index, lease.job_id, lost.message)
            return self._write(lease, owed, model_name, lost)

    def _write(self, lease: ShardLease, owed: _Owed, model_name: str | None, lost: Unanswered | None) -> ShardResult:
        assert lease.close_as is not None
        job = owed.job
        storage = open_storage(job.spec.output)
        folder = OutputFolder(job.spec.output, job.job_id)
        durable = read_checkpoints(storage, folder.checkpoints(lease.generation), lease.range.index)
        build: Callable[..., PartInfo]
        if lease.replaces_etag is None:
            reason = lost if lost is not None and lease.close_as is ShardState.DISCARDED else _REASONS[lease.close_as]
            build = partial(write_part, unanswered=reason)
        else:  # a retry that was stopped: rows it had not come to keep the errors they have
            build = partial(replace_part, etag=lease.replaces_etag)
        part = build(
            storage,
            folder,
            lease.range,
            durable,
            spec=job.spec,
            spec_digest=job.spec_digest,
            source_schema=owed.schema,
            model=model_name or job.spec.model.model,
            attempt=lease.attempt,
            source_storage=owed.sources,
            source_lost=lost is not None,
        )
        return part.result(rows_resumed=len(durable))

    def _look(self, job_id: str) -> _Owed:
        job = self._store.job(job_id)
        schema, sources = planned_inputs(self._store, job)
        return _Owed(job, schema, sources)


def planned_inputs(store: Store, job: JobInfo) -> tuple[pa.Schema, Storage]:
    """The schema of all inputs together, and the inputs as they were planned.

    Raises:
        StorageError: the submitter did not write the schema down, and an input cannot be read.
        ValidationError: the same, and the inputs do not fit each other.
    """
    sources = store.sources(job.job_id)
    told = store.source_schema(job.job_id)
    storage = pinned(sources)
    return (job_source_schema(sources, job.spec, storage=storage) if told is None else decode_schema(told)), storage


def _lost_source(lease: ShardLease, owed: _Owed, error: StorageError, *, gives_up: bool) -> Unanswered | None:
    """What to write in the rows of an input that cannot be read any more; None: that is not it, or not yet."""
    if not gives_up and not is_source_lost(error, lease.range.source_file):
        return None
    try:
        for _ in read_range(lease.range, storage=owed.sources):
            pass
    except StorageError as now:
        changed = isinstance(now, SourceChangedError) and not now.is_gone
        code = RowErrorCode.SOURCE_CHANGED if changed else RowErrorCode.SOURCE_MISSING
        return Unanswered(code=code, message=now.message)
    return None


def finalize(store: Store, job: JobInfo) -> None:
    """Write the manifest, and `_SUCCESS` for a job that will be `completed`; remove its checkpoints."""
    states = {state for state, count in job.num_shards_by_state.items() if count}
    success = (
        job.status is JobStatus.FINALIZING
        and job.error_code is None
        and ShardState.EXPIRED not in states
        and states != {ShardState.DISCARDED}
    )
    finalize_output(
        open_storage(job.spec.output),
        OutputFolder(job.spec.output, job.job_id),
        store.shard_results(job.job_id),
        spec=job.spec,
        spec_digest=job.spec_digest,
        success=success,
    )
