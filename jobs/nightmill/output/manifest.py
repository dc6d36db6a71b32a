"""The end of a job: `_manifest.json`, `_SUCCESS`, and the checkpoints go."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import PurePosixPath
from typing import Any

from nightmill.errors import PartLostError
from nightmill.failpoint import failpoint
from nightmill.output.folder import OutputFolder
from nightmill.output.part import publish_part
from nightmill.reader.many import map_files
from nightmill.records import CommittedShard, JobSpec
from nightmill.sharding import source_name
from nightmill.states import ShardState
from nightmill.storage import Storage

MANIFEST_VERSION = 1
_WRITTEN_BY_ATTEMPTS = re.compile(r"(retry-\d+/)?shard-\d+/(ckpt-\d+-\d+\.parquet|part-\d+\.parquet|inflight\.json)")


def finalize_output(
    storage: Storage,
    folder: OutputFolder,
    shards: Sequence[CommittedShard],
    *,
    spec: JobSpec,
    spec_digest: str,
    success: bool = True,
) -> None:
    """Write the manifest, then `_SUCCESS`, then remove this job's checkpoints. May be run again after a crash.

    Args:
        storage: Of the output.
        folder: Of the job.
        shards: All of the job's, terminal.
        spec: Of the job.
        spec_digest: Of the job.
        success: False for a job that failed, was cancelled or expired: it gets no `_SUCCESS`.

    Raises:
        PartLostError: a part is missing or damaged. StorageError: writing failed. What is there stays, the next try
            goes on.
    """
    if not storage.creates_atomically(folder.root):
        attempts = {shard.result.part_uri: (shard.range.index, shard.attempt) for shard in shards}
        map_files(lambda uri: publish_part(storage, folder, *attempts[uri]), list(attempts))
    require_parts(storage, shards)
    _put(storage, folder.manifest, manifest_bytes(shards, spec=spec, spec_digest=spec_digest))
    failpoint("in_finalize")
    if success:
        _put(storage, folder.success, b"")
    remove_checkpoints(storage, folder)


def require_parts(storage: Storage, shards: Sequence[CommittedShard]) -> None:
    """Make sure that every committed part is there, as long as it was committed.

    Raises:
        PartLostError: one was removed or cut short by somebody else; it names the part.
    """
    expected = {shard.result.part_uri: shard.result.part_bytes for shard in shards}

    def require(uri: str) -> None:
        found = storage.stat(uri)
        if found is None or found.size_bytes != expected[uri]:
            state = "is gone" if found is None else f"has {found.size_bytes:,} bytes instead of {expected[uri]:,}"
            raise PartLostError(
                f"the committed part {uri} {state}: something other than nightmill changed it",
                hint="put the file back and run again, or remove the output folder to compute the job anew",
            )

    map_files(require, list(expected))


def manifest_bytes(shards: Sequence[CommittedShard], *, spec: JobSpec, spec_digest: str) -> bytes:
    """The manifest's text: equal results give equal bytes.

    So it holds no time, no job id, no etag, no attempt, and not the tokens taken from the prefix index, which depend
    on the schedule.
    """
    rows: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    error_codes: Counter[str] = Counter()
    parts = []
    for shard in sorted(shards, key=lambda shard: shard.range.index):
        rows.update(asdict(shard.result.rows))
        tokens.update({"prompt": shard.result.tokens.prompt, "completion": shard.result.tokens.completion})
        error_codes.update(shard.result.error_codes)
        parts.append(_part(shard, spec))
    manifest = {
        "version": MANIFEST_VERSION,
        "spec_digest": spec_digest,
        "rows": dict(rows),
        "tokens": dict(tokens),
        "error_codes": dict(error_codes),
        "parts": parts,
    }
    return (json.dumps(manifest, sort_keys=True, indent=1) + "\n").encode()


def _part(shard: CommittedShard, spec: JobSpec) -> dict[str, Any]:
    return {
        "path": PurePosixPath(shard.result.part_uri).name,
        "source_file": source_name(spec.inputs, shard.range.source_file),
        "row_start": shard.range.row_start,
        "row_end": shard.range.row_end,
        "state": ShardState(shard.state).value,
        "rows": asdict(shard.result.rows),
    }


def remove_checkpoints(storage: Storage, folder: OutputFolder) -> None:
    """Remove the files that this job's attempts have written while it ran, and nothing else."""
    found = (info.uri for info in storage.list(folder.work))
    map_files(
        storage.delete, [uri for uri in found if _WRITTEN_BY_ATTEMPTS.fullmatch(uri.removeprefix(folder.work + "/"))]
    )
    storage.remove_empty_folders(folder.work)
    storage.sweep(folder.root)


def _put(storage: Storage, uri: str, data: bytes) -> None:
    with storage.stage(uri) as staged:
        staged.file.write(data)
        staged.replace()
