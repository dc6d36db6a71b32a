"""Submit: whose output is it, what is in the input, cut it into shards, write it down. Or resume what is there."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from nightmill.errors import NotFoundError, OutputOccupiedError, SpecMismatchError
from nightmill.failpoint import failpoint
from nightmill.job_file import JobFile, create_job_file, job_file_uri, read_job_file
from nightmill.job_id import new_job_id
from nightmill.records import JobInfo, JobOptions, JobSpec, SourceFile
from nightmill.rows.schema import encode_schema
from nightmill.sharding import list_sources, plan_shards
from nightmill.spec import diff_sources, diff_specs, spec_digest
from nightmill.states import TERMINAL_JOB
from nightmill.storage import Storage, absolute, open_storage
from nightmill.storage.location import is_probe
from nightmill.store import Store

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Check", "absolute_spec", "diff_specs", "new_job_id", "spec_digest", "submit_job"]

Check = Callable[[JobSpec, Sequence[SourceFile]], "pa.Schema | None"]
"""Looks at the input before anything is written; raises ValidationError to refuse it. Returns the schema of all files
together, so that the job can end whatever becomes of them; None: whoever needs it reads all their footers."""


PlanProgress = Callable[[str, int, int], None]
"""Gets what is done to files, to how many it is done, and of how many."""


def say_nothing(what: str, done: int, total: int) -> None:
    """Where nobody waits for it."""


def submit_job(
    store: Store,
    spec: JobSpec,
    options: JobOptions,
    *,
    model_digest: str | None = None,
    check: Check | None = None,
    storage: Storage | None = None,
    progress: PlanProgress = say_nothing,
) -> JobInfo:
    """Create the job, or find it: the same specification into the same output is the same job.

    Safe to call twice at once and to kill at any point: calling it again goes on from there. The job that comes back
    may have ended; look at its status.

    Args:
        model_digest: content of the resolved model; None when it is not known yet.
        check: run on the input of a new job only.
        progress: told how the look at many files goes.

    Raises:
        SpecMismatchError: the output, or the idempotency key, belongs to a job that would answer otherwise.
        OutputOccupiedError: the output holds files of somebody else, or a running job's output was taken away.
        ValidationError: the input is not fit.
    """
    spec = absolute_spec(spec)
    storage = storage or open_storage(spec.output)
    if options.idempotency_key is not None:
        known = store.job_for_key(options.idempotency_key)
        if known is not None:
            return _same_key(known, spec, model_digest)
    owner = _owner(store, storage, spec.output)
    if owner is None:
        wanted = _plan(spec, options, model_digest, check, progress)
        if create_job_file(storage, wanted):
            failpoint("after_job_file")
            _retire_predecessor(store, storage, wanted)
            return _insert(store, wanted, options, progress)
        owner = read_job_file(storage, spec.output)  # another process was faster by a moment
        if owner is None:
            raise OutputOccupiedError(f"{job_file_uri(spec.output)} comes and goes: is something deleting there?")
    _require_same(owner, spec, model_digest)
    try:
        return store.job(owner.job_id)
    except NotFoundError:  # killed before the insert, or another store: the files know the rest
        return _insert(store, owner, options, progress)


def absolute_spec(spec: JobSpec) -> JobSpec:
    """The same specification from any working directory."""
    return replace(spec, inputs=tuple(absolute(uri) for uri in spec.inputs), output=absolute(spec.output))


def _owner(store: Store, storage: Storage, output: str) -> JobFile | None:
    """The job that owns the output; None when the output is empty.

    Raises:
        OutputOccupiedError: files are there, and nothing says that they are ours.
    """
    if storage.stat(output) is not None:
        raise OutputOccupiedError(f"the output {output} is a file", hint="name a folder: it may be new")
    owner = read_job_file(storage, output)
    if owner is None:
        files = [info.uri for info in storage.list(output) if not is_probe(info.uri)]
        if files and job_file_uri(output) in files:  # created since we looked
            return read_job_file(storage, output)
        owner = _from_store(store, output, files)
        if owner is not None:  # its job file was removed
            create_job_file(storage, owner)
        elif files:
            raise OutputOccupiedError(
                f"the output {output} holds {len(files)} file(s) that no job of nightmill wrote, among them {files[0]}",
                hint="choose an empty or a new folder; nightmill never deletes what it did not write",
            )
    return owner


def _from_store(store: Store, output: str, files: Sequence[str]) -> JobFile | None:
    """The job that the store knows to have written some of these files."""
    known = store.job_for_output(output)
    if known is None or not any(uri.startswith(f"{output.rstrip('/')}/_nightmill/{known.job_id}/") for uri in files):
        return None
    return JobFile(
        job_id=known.job_id,
        spec_digest=known.spec_digest,
        spec=known.spec,
        model_digest=known.model_digest,
        shard_rows=known.options.shard_rows,
        sources=tuple(store.sources(known.job_id)),
        source_schema=store.source_schema(known.job_id),
    )


def _plan(
    spec: JobSpec, options: JobOptions, model_digest: str | None, check: Check | None, progress: PlanProgress
) -> JobFile:
    sources = list_sources(spec.inputs, output=spec.output, progress=partial(progress, "reading sizes"))
    schema = None if check is None else check(spec, sources)
    return JobFile(
        job_id=new_job_id(),
        spec_digest=spec_digest(spec),
        spec=spec,
        model_digest=model_digest,
        shard_rows=options.shard_rows,
        sources=sources,
        source_schema=None if schema is None else encode_schema(schema),
    )


def _insert(store: Store, job_file: JobFile, options: JobOptions, progress: PlanProgress) -> JobInfo:
    options = replace(options, shard_rows=job_file.shard_rows)
    info = store.create_job(
        job_file.job_id,
        job_file.spec,
        job_file.spec_digest,
        options,
        job_file.sources,
        plan_shards(job_file.sources, job_file.shard_rows, progress=partial(progress, "cutting into shards")),
        model_digest=job_file.model_digest,
        source_schema=job_file.source_schema,
    )
    if info.job_id != job_file.job_id:
        raise OutputOccupiedError(
            f"job {info.job_id} took the idempotency key {options.idempotency_key!r} at the same moment",
            hint=f"remove {job_file_uri(job_file.spec.output)} and submit again",
        )
    return info


def _require_same(owner: JobFile, spec: JobSpec, model_digest: str | None) -> None:
    lines = diff_specs(owner.spec, spec) + _diff_model(owner.model_digest, model_digest)
    if not lines:  # when the inputs' names differ, what is in them says nothing
        lines = diff_sources(owner.sources, list_sources(spec.inputs, output=spec.output))
    if lines:
        raise _mismatch(f"the output {spec.output} belongs to {owner.job_id}, which is another job:", lines)


def _same_key(known: JobInfo, spec: JobSpec, model_digest: str | None) -> JobInfo:
    lines = diff_specs(known.spec, spec) + _diff_model(known.model_digest, model_digest)
    if known.spec.output != spec.output:
        lines.append(f"output: {known.spec.output} → {spec.output}")
    if lines:
        raise _mismatch(f"this idempotency key was used for {known.job_id}, which is another job:", lines)
    return known


def _diff_model(old: str | None, new: str | None) -> list[str]:
    return [f"content of the model: {old} → {new}"] if old and new and old != new else []


def _mismatch(headline: str, lines: Sequence[str]) -> SpecMismatchError:
    return SpecMismatchError(
        "\n    ".join([headline, *lines]), hint="choose another output, or run with the values the job was made with"
    )


def _retire_predecessor(store: Store, storage: Storage, wanted: JobFile) -> None:
    """We own the output, so what the store last knew to write there has lost its files."""
    old = store.job_for_output(wanted.spec.output)
    if old is None or old.job_id == wanted.job_id or old.status in TERMINAL_JOB:
        return
    if store.has_live_leases(old.job_id):
        storage.delete(job_file_uri(wanted.spec.output))
        raise OutputOccupiedError(
            f"{old.job_id} is running into {wanted.spec.output}, and its files were taken away",
            hint=f"nightmill cancel {old.job_id}, then submit again",
        )
    store.abandon_job(old.job_id, "output_removed", "its output was removed before it had finished")
