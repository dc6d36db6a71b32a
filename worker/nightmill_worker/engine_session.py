"""One loaded model with its engine, and what shards of each job need to run on it."""

import itertools
import logging
import time

from nightmill.output.closer import planned_inputs
from nightmill.output.folder import OutputFolder
from nightmill.records import JobInfo
from nightmill.storage import open_storage
from nightmill.store import LEASE_TTL_S, Store
from nightmill_worker.engine_start import EarlyEngine, RunOptions, begin_engine
from nightmill_worker.feed.requests import RequestMaker
from nightmill_worker.feed.tokenizer import Tokenizer
from nightmill_worker.loaded_model import LoadedModel
from nightmill_worker.model.device_choice import resolve_limits
from nightmill_worker.service import DeathCause, EngineDiedError, EngineService
from nightmill_worker.shard import JobContext
from nightmill_worker.supervisor import EngineSupervisor, FeedLimits
from nightmill_worker.wire import EngineInfo

__all__ = ["EngineSession", "RunOptions", "engine_line"]

log = logging.getLogger(__name__)

LOAD_PAUSES_S = (1.0, 5.0)  # before another try to load: memory that was short may be there again


class EngineSession:
    """Starts the engine when it is made; `close` ends it. Raises ModelError or EngineError when it cannot start."""

    def __init__(self, model: LoadedModel, options: RunOptions, early: EarlyEngine | None = None) -> None:
        """`early`: an engine of this model that may have begun to load; None: it begins now."""
        self.model = model
        self._options = options
        self._early = early
        self._request_ids = itertools.count()  # of all jobs: ids are unique in an engine
        self.limits = FeedLimits.of(resolve_limits(options.engine).max_num_seqs, options.engine.look_ahead)
        self.supervisor = EngineSupervisor(self._start_engine, self.limits)

    def close(self) -> None:
        """End the engine. What is still inside is lost."""
        self.supervisor.close()

    def job_context(self, job: JobInfo, store: Store, *, lease_ttl_s: float = LEASE_TTL_S) -> JobContext:
        """What all shards of a job share here.

        Raises:
            ValidationError: The job does not fit the model, or its inputs do not fit each other.
            StorageError: An input cannot be read.
        """
        spec = job.spec
        tokenizer = self.model.tokenizer
        if "strftime_now" in tokenizer.template_source:
            # A prompt with today's date in it must be the same when the job is resumed on another day.
            tokenizer = Tokenizer.load(self.model.directory, now=job.created_at)
        source_schema, sources = planned_inputs(store, job)
        return JobContext(
            job=job,
            store=store,
            storage=open_storage(spec.output),
            folder=OutputFolder(spec.output, job.job_id),
            source_schema=source_schema,
            model_name=self.model.name,
            tokenizer=tokenizer,
            maker=RequestMaker(
                tokenizer,
                spec,
                job_id=job.job_id,
                tier=job.options.tier,
                max_model_len=self.supervisor.service.info.max_model_len,
                request_ids=self._request_ids,
                vocab_size=self.supervisor.service.info.vocab_size,
            ),
            sources=sources,
            lease_ttl_s=lease_ttl_s,
        )

    def _start_engine(self) -> EngineService:
        """Load it. An engine that is killed meanwhile says nothing about the model: whole jobs would fail for it."""
        service = self._early.take() if self._early is not None else None
        for pause_s in (*LOAD_PAUSES_S, None):
            if service is None:
                service = begin_engine(self.model, self._options)
            try:
                service.wait_ready()
                return service
            except EngineDiedError as error:
                if pause_s is None or error.cause not in (DeathCause.KILL, DeathCause.SIGNAL):
                    raise
                log.warning("%s is loaded once more in %g s: %s", self.model.name, pause_s, error)
            service = None
            time.sleep(pause_s)
        raise AssertionError("unreachable")


def engine_line(name: str, info: EngineInfo) -> str:
    """What was sized from what: one line at the start."""
    pool = info.pool
    tokens = (pool.num_pages - 1) * pool.page_size
    return (
        f"{name}: loaded in {info.start_s:.1f} s, {pool.bytes_per_token:,} bytes of KV per token; "
        f"page pool {pool.num_pages - 1:,} pages of {pool.page_size} = {tokens:,} tokens "
        f"({tokens * pool.bytes_per_token / 2**20:,.0f} MiB); context {info.max_model_len:,} tokens"
    )
