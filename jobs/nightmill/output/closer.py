"""The part of a shard that nobody will compute any more: what is checkpointed, and an error row for the rest."""

from nightmill.errors import RowErrorCode
from nightmill.output.checkpoint import read_checkpoints
from nightmill.output.folder import OutputFolder
from nightmill.output.part import write_part
from nightmill.output.part_rows import Unanswered
from nightmill.records import JobInfo, ShardLease, ShardResult
from nightmill.rows import job_source_schema
from nightmill.states import ShardState
from nightmill.storage import open_storage
from nightmill.store import Store

_REASONS = {
    ShardState.CANCELLED: Unanswered(code=RowErrorCode.BATCH_CANCELLED, message="the job was stopped before this row"),
    ShardState.EXPIRED: Unanswered(code=RowErrorCode.BATCH_EXPIRED, message="the job expired before this row ran"),
    ShardState.DISCARDED: Unanswered(
        code=RowErrorCode.QUARANTINED, message="the process died each time it came to this row or its neighbours"
    ),
}


def close_part(store: Store, model_name: str, lease: ShardLease, job: JobInfo) -> ShardResult:
    """Write the part of a shard leased for closing (`lease.close_as`); a ClosePart but for its first two arguments."""
    assert lease.close_as is not None
    storage = open_storage(job.spec.output)
    folder = OutputFolder(job.spec.output, job.job_id)
    durable = read_checkpoints(storage, folder.work, lease.range.index)
    part = write_part(
        storage,
        folder,
        lease.range,
        durable,
        spec=job.spec,
        spec_digest=job.spec_digest,
        source_schema=job_source_schema(store.sources(job.job_id), job.spec),
        model=model_name,
        unanswered=_REASONS[lease.close_as],
    )
    return part.result(rows_resumed=len(durable))
