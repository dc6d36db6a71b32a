"""`<output>/_nightmill/job.json`: says whose output this is, also when the store that knew the job is gone."""

from dataclasses import dataclass

from nightmill.canonical import decode, encode
from nightmill.errors import OutputOccupiedError
from nightmill.records import JobSpec, SourceFile
from nightmill.storage import ObjectExistsError, Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """Enough to resume the job, or to tell that another one is wanted."""

    job_id: str
    spec_digest: str
    spec: JobSpec
    model_digest: str | None
    shard_rows: int  # parts are named by shard: a job planned anew must be cut the same
    sources: tuple[SourceFile, ...]
    source_schema: str | None = None  # of all sources together: rows.schema.encode_schema


def job_file_uri(output: str) -> str:
    """Where it stands."""
    return f"{output.rstrip('/')}/_nightmill/job.json"


def read_job_file(storage: Storage, output: str) -> JobFile | None:
    """None: there is no such file.

    Raises:
        OutputOccupiedError: it cannot be understood.
    """
    uri = job_file_uri(output)
    if storage.stat(uri) is None:
        return None
    with storage.open_input(uri) as file:
        data = file.read()
    try:
        return decode(JobFile, data.decode("utf-8"))
    except (ValueError, TypeError) as error:
        raise OutputOccupiedError(
            f"{uri} is not readable as a job of nightmill: {error}", hint="choose another output"
        ) from error


def create_job_file(storage: Storage, job_file: JobFile) -> bool:
    """Take the output for this job; False when another took it first."""
    with storage.stage(job_file_uri(job_file.spec.output)) as staged:
        staged.file.write(encode(job_file).encode("ascii"))
        try:
            staged.create()
        except ObjectExistsError:
            return False
    return True
