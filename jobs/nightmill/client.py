"""`nightmill.Client`: submit jobs and read their results from Python. Needs no torch and no worker on this machine.

    with Client() as client:
        job = client.submit("s3://lake/prompts/", "s3://lake/answers/", "org/name", max_tokens=64)
        job.wait(timeout="6h")
        answers = job.results()  # a pyarrow.Table; join it on custom_id

Settings come from the environment as for the command line (DATABASE_URL, CELERY_BROKER_URL, AWS_*); the arguments of
`Client` go before them.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from nightmill.config import Settings
from nightmill.durations import parse_duration
from nightmill.errors import JobStateError, NotFoundError, RowError, ValidationError
from nightmill.job_flags import JobFlags, ignored_options, read_flags
from nightmill.lookup import find_job
from nightmill.records import JobInfo
from nightmill.states import TERMINAL_JOB, JobStatus
from nightmill.store import Store
from nightmill.waiting import looks

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.dataset as ds

    from nightmill.output.results import ResultReader

log = logging.getLogger(__name__)


class Client:
    """A connection to the job store, and to the broker when there is one. Safe to share between threads.

    A context manager; or call `close`. Make it after a fork, not before.
    """

    def __init__(
        self,
        database_url: str | None = None,
        broker_url: str | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """Read the settings and bring the store up to date.

        Args:
            database_url: `postgresql://…` or `sqlite:///…`; None: DATABASE_URL.
            broker_url: `amqp://…`; None: CELERY_BROKER_URL.
            environ: In place of the process's environment.

        Raises:
            ConfigError: a setting is unknown or has a bad value; it is named.
            StoreError: the store cannot be reached.
        """
        environment = dict(os.environ if environ is None else environ)
        if database_url is not None:
            environment["DATABASE_URL"] = database_url
        if broker_url is not None:
            environment["CELERY_BROKER_URL"] = broker_url
        self.settings = Settings.from_env(environment)
        self._store = Store(self.settings.database_url)
        try:
            self._store.migrate()
        except BaseException:
            self._store.close()
            raise

    def submit(self, inputs: str | Sequence[str], output: str, model: str, **flags: Unpack[JobFlags]) -> "Job":
        """Submit a job; the same arguments again find the same job, also when they run at once.

        A broker that cannot be reached is logged as a warning: the job is written down, and workers find it.

        Args:
            inputs: A Parquet file, a folder, a glob, or a .jsonl file in OpenAI's batch form; or several.
            output: A new or empty folder, or this job's.
            model: A hub id, `s3://…`, or a path that the workers see.
            flags: Those of `nightmill submit`, with underscores: `max_tokens=64`, `idempotency_key="daily-2026-11-29"`.

        Raises:
            ValidationError: the input does not fit, or a value is out of range; nothing was submitted.
            SpecMismatchError: the output or the idempotency key belongs to another job; it lists what differs.
            TypeError: there is no such flag.
        """
        from nightmill.submission import submit_and_ring

        sources = [inputs] if isinstance(inputs, str) else list(inputs)
        try:
            spec, options = read_flags(sources, output, model, flags)
        except RowError as error:
            raise ValidationError(error.message) from error
        except ValueError as error:
            raise ValidationError(str(error)) from error
        info, trouble = submit_and_ring(self._store, self.settings, spec, options)
        for line in ignored_options(options, info):
            log.warning("%s", line)
        if trouble is not None:
            log.warning("job %s is queued, but the broker could not be rung: %s", info.job_id, trouble)
        return Job(self, info)

    def job(self, reference: str) -> "Job":
        """The job with this id, or the newest one with this output.

        Raises:
            NotFoundError: there is none.
        """
        return Job(self, find_job(self._store, reference))

    def jobs(self, limit: int = 100, status: JobStatus | str | None = None) -> "list[Job]":
        """Jobs, newest first."""
        found = self._store.jobs(limit, None if status is None else JobStatus(status))
        return [Job(self, info) for info in found]

    @property
    def store(self) -> Store:
        """The job store, for what the client does not offer."""
        return self._store

    def close(self) -> None:
        """Close all connections; jobs go on."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Job:
    """One job of a client's store. Everything is asked of the store when it is called for; nothing is remembered."""

    def __init__(self, client: Client, info: JobInfo) -> None:
        self._client = client
        self.id = info.job_id
        self.output = info.spec.output

    def __repr__(self) -> str:
        return f"<nightmill.Job {self.id} → {self.output}>"

    def info(self) -> JobInfo:
        """Status, counts, tokens, times, as they are now."""
        return self._client.store.job(self.id)

    @property
    def status(self) -> JobStatus:
        """Where it stands now."""
        return self.info().status

    @property
    def done(self) -> bool:
        """True when it has ended, however."""
        return self.status in TERMINAL_JOB

    def wait(
        self,
        timeout: str | float | timedelta | None = None,
        *,
        on_progress: Callable[[JobInfo], object] | None = None,
    ) -> JobInfo:
        """Wait until the job has ended; returns how. A restart of the database is waited out.

        Args:
            timeout: Seconds, `"6h"` or a timedelta; None: as long as it takes.
            on_progress: Called with each look at the job, about once a second.

        Raises:
            WaitTimedOutError: it has not ended in time; it goes on.
            StoreError: the store does not come back.
        """
        timeout_s = None if timeout is None else parse_duration(timeout)
        info = None
        for look in looks(self._client.store, self.id, timeout_s=timeout_s):
            if look.job is None:
                log.warning("the job store does not answer, trying again: %s", look.trouble)
                continue
            info = look.job
            if on_progress is not None:
                on_progress(info)
        assert info is not None
        return info

    def results(self, columns: Sequence[str] | None = None, *, partial: bool = False) -> "pa.Table":
        """Every output row, in input order, as one table in memory; texts are large_string.

        Args:
            columns: Only these.
            partial: Of a job that has not ended: the rows of the parts that are there.

        Raises:
            JobStateError: it has not ended, and `partial` was not asked for.
            StorageError: a part cannot be read.
        """
        return self._reader(partial).table(columns)

    def iter_results(
        self, columns: Sequence[str] | None = None, *, batch_rows: int = 8192, partial: bool = False
    ) -> "Iterator[pa.RecordBatch]":
        """The rows of `results`, a batch at a time: memory does not grow with the job."""
        return self._reader(partial).batches(columns, batch_rows=batch_rows)

    def dataset(self, *, partial: bool = False) -> "ds.Dataset":
        """The parts as a pyarrow dataset: filter and project without reading everything. Made of the parts that the
        store knows, not of what lies in the folder.
        """
        return self._reader(partial).dataset()

    def errors(self, *, partial: bool = False) -> "pa.Table":
        """Rows without a completion: source_file, row_index, custom_id (string), error_code, error_message."""
        return self._reader(partial).errors()

    def cancel(self) -> JobInfo:
        """Ask the job to stop; what is finished stays. Again: no change. `wait` for it to take effect.

        Raises:
            JobStateError: it has ended already, otherwise than by cancelling.
        """
        return self._client.store.cancel(self.id)

    def retry(self) -> int:
        """Run the rows again that have no completion; returns how many (0: every row has one).

        Raises:
            JobStateError: the job has not ended, or its output belongs to another job now.
        """
        from nightmill.submission import retry_and_ring

        num_rows, trouble = retry_and_ring(self._client.store, self._client.settings, self.info())
        if trouble is not None:
            log.warning("job %s is queued again, but the broker could not be rung: %s", self.id, trouble)
        return num_rows

    def _reader(self, partial: bool) -> "ResultReader":
        from nightmill.output.results import ResultReader

        info = self.info()
        if info.status not in TERMINAL_JOB and not partial:
            raise JobStateError(
                f"job {self.id} is {info.status.value}: its results are not complete",
                hint="wait() for it, or pass partial=True for the parts that are there",
            )
        shards = self._client.store.shard_results(self.id)
        if not shards:
            raise NotFoundError(f"job {self.id} is {info.status.value} and has no parts yet", hint="wait() for it")
        return ResultReader(info, shards)


__all__: Any = ["Client", "Job"]
