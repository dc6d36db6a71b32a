"""The end of shards that nobody will compute any more, and of jobs whose shards have all ended. Needs no model."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pyarrow as pa

from nightmill.closing import OnceRead, close_due
from nightmill.errors import RowErrorCode
from nightmill.output.checkpoint import read_checkpoints
from nightmill.output.folder import OutputFolder
from nightmill.output.manifest import finalize_output
from nightmill.output.part import PartInfo, replace_part, write_part
from nightmill.output.part_rows import Unanswered
from nightmill.records import JobInfo, ShardLease, ShardResult
from nightmill.rows import job_source_schema
from nightmill.states import TERMINAL_JOB, JobStatus, ShardState
from nightmill.storage import Storage, open_storage, pinned
from nightmill.store import Store

_REASONS = {
    ShardState.CANCELLED: Unanswered(code=RowErrorCode.BATCH_CANCELLED, message="the job was stopped before this row"),
    ShardState.EXPIRED: Unanswered(code=RowErrorCode.BATCH_EXPIRED, message="the job expired before this row ran"),
    ShardState.DISCARDED: Unanswered(
        code=RowErrorCode.QUARANTINED, message="the process died each time it came to this row or its neighbours"
    ),
}


def wind_up(store: Store, job_id: str, worker_id: str, model_name: str) -> bool:
    """Write the parts of shards that may not run any more; end the job when every part stands. True: it has ended.

    Safe to run again after a crash, and by several at once.
    """
    closer = PartCloser(store)
    while close_due(store, worker_id, lambda lease, job: closer.close(lease, job, model_name), job_id=job_id):
        pass
    if store.begin_finalize(job_id):
        finalize(store, store.job(job_id))
        store.complete_job(job_id)
    return store.job(job_id).status in TERMINAL_JOB


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Of one job."""

    schema: pa.Schema
    storage: Storage


class PartCloser:
    """Writes the parts of shards leased for closing, several at once; the inputs of a job are looked at once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._jobs: OnceRead[JobInfo] = OnceRead(store.job)
        self._inputs: OnceRead[_Inputs] = OnceRead(self._look)

    def close(self, lease: ShardLease, job: JobInfo | None = None, model_name: str | None = None) -> ShardResult:
        """Write a shard's part: checkpointed rows, and error rows by `lease.close_as` for the rest."""
        job = job or self._jobs.get(lease.job_id)
        assert lease.close_as is not None
        storage = open_storage(job.spec.output)
        folder = OutputFolder(job.spec.output, job.job_id)
        inputs = self._inputs.get(job.job_id)
        durable = read_checkpoints(storage, folder.work, lease.range.index)
        build: Callable[..., PartInfo]
        if lease.replaces_etag is None:
            build = partial(write_part, unanswered=_REASONS[lease.close_as])
        else:  # a retry that was stopped: rows it had not come to keep the errors they have
            build = partial(replace_part, etag=lease.replaces_etag)
        part = build(
            storage,
            folder,
            lease.range,
            durable,
            spec=job.spec,
            spec_digest=job.spec_digest,
            source_schema=inputs.schema,
            model=model_name or job.spec.model.model,
            attempt=lease.attempt,
            source_storage=inputs.storage,
        )
        return part.result(rows_resumed=len(durable))

    def _look(self, job_id: str) -> _Inputs:
        sources = self._store.sources(job_id)
        storage = pinned(sources)
        return _Inputs(job_source_schema(sources, self._jobs.get(job_id).spec, storage=storage), storage)


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
