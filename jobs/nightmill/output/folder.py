"""The names of everything below a job's output folder, and whose folder it is."""

import json
from dataclasses import dataclass
from pathlib import PurePosixPath

from nightmill.errors import OutputOccupiedError, StorageError
from nightmill.storage import ObjectExistsError, Storage, absolute, open_storage

JOB_FILE_VERSION = 1


@dataclass(frozen=True, slots=True)
class OutputFolder:
    """Paths below one output. Names that begin with `_` are invisible to Spark, DuckDB, pandas and polars."""

    uri: str
    job_id: str

    @property
    def root(self) -> str:
        """The folder itself, absolute."""
        return absolute(self.uri)

    @property
    def job_file(self) -> str:
        """Says which job the folder belongs to."""
        return job_file_uri(self.uri)

    @property
    def work(self) -> str:
        """Checkpoints of this job; gone when it is done."""
        return f"{self.root}/_nightmill/{self.job_id}"

    @property
    def manifest(self) -> str:
        """Written when every shard is terminal."""
        return f"{self.root}/_manifest.json"

    @property
    def success(self) -> str:
        """Empty; its presence says that the folder is complete."""
        return f"{self.root}/_SUCCESS"

    def part(self, shard_index: int) -> str:
        """The one part of a shard."""
        return f"{self.root}/part-{shard_index:05d}.parquet"


def job_file_uri(output: str) -> str:
    """Where an output folder says whose it is."""
    return f"{absolute(output)}/_nightmill/job.json"


def shard_folder(work: str, shard_index: int) -> str:
    """Folder of one shard's checkpoints."""
    return f"{work}/shard-{shard_index:05d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """What job.json says."""

    job_id: str
    spec_digest: str
    spec: str  # canonical JSON, for the diff shown when another spec comes for the same folder


def read_job_file(output: str, *, storage: Storage | None = None) -> JobFile | None:
    """Whose folder it is; None: nobody's.

    Raises:
        StorageError: the file is there and is not ours or not readable.
    """
    storage = storage or open_storage(output)
    uri = job_file_uri(output)
    if storage.stat(uri) is None:
        return None
    with storage.open_input(uri) as file:
        text = file.read()
    try:
        fields = json.loads(text)
        if fields["version"] != JOB_FILE_VERSION:
            raise ValueError(f"version {fields['version']}")
        return JobFile(job_id=str(fields["job_id"]), spec_digest=str(fields["spec_digest"]), spec=str(fields["spec"]))
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(
            f"{uri} cannot be understood: {error}", hint="Choose another output folder, or update nightmill."
        ) from error


def claim_output(output: str, job: JobFile, *, storage: Storage | None = None) -> JobFile:
    """Make the folder the job's, or tell whose it is: the caller compares the returned job with its own.

    Nothing is ever removed. Files whose names begin with `.` do not count: no reader sees them.

    Raises:
        OutputOccupiedError: the folder holds files and belongs to no job.
    """
    storage = storage or open_storage(output)
    if owner := read_job_file(output, storage=storage):
        return owner
    root = absolute(output)
    if storage.stat(root) is not None:
        raise OutputOccupiedError(f"{output} is a file", hint="Give a folder with -o.")
    foreign = [info.uri for info in storage.list(root) if not PurePosixPath(info.uri).name.startswith(".")]
    if foreign:
        shown = ", ".join(foreign[:3]) + (f" and {len(foreign) - 3} more" if len(foreign) > 3 else "")
        raise OutputOccupiedError(
            f"{output} already holds files that are not this job's: {shown}",
            hint="Choose an empty or new folder with -o; nothing was changed.",
        )
    fields = {"job_id": job.job_id, "spec": job.spec, "spec_digest": job.spec_digest, "version": JOB_FILE_VERSION}
    try:
        with storage.stage(job_file_uri(output)) as staged:
            staged.file.write((json.dumps(fields, sort_keys=True, indent=1) + "\n").encode())
            staged.create()
    except ObjectExistsError:  # another submit was faster
        return read_job_file(output, storage=storage) or job
    return job
