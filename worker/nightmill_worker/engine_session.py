"""One loaded model with its engine, and what shards of each job need to run on it."""

import itertools
from dataclasses import dataclass

from nightmill.output.closer import planned_inputs
from nightmill.output.folder import OutputFolder
from nightmill.records import EngineOptions, JobInfo
from nightmill.storage import open_storage
from nightmill.store import LEASE_TTL_S, Store
from nightmill_worker.engine.options import LoopOptions
from nightmill_worker.feed.requests import RequestMaker
from nightmill_worker.feed.tokenizer import Tokenizer
from nightmill_worker.loaded_model import LoadedModel
from nightmill_worker.model.device_choice import CUDA, resolve_limits
from nightmill_worker.service import DEFAULT_STEP_TIMEOUT_S, EngineService
from nightmill_worker.shard import JobContext
from nightmill_worker.supervisor import EngineSupervisor, FeedLimits
from nightmill_worker.wire import EngineInfo

NO_LIMIT = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How this process runs jobs; nothing in here changes an answer."""

    engine: EngineOptions
    in_process: bool = False
    step_timeout_s: float = DEFAULT_STEP_TIMEOUT_S


class EngineSession:
    """Starts the engine when it is made; `close` ends it. Raises ModelError or EngineError when it cannot start."""

    def __init__(self, model: LoadedModel, options: RunOptions) -> None:
        self.model = model
        self._options = options
        self._step_limits = resolve_limits(options.engine)
        self._request_ids = itertools.count()  # of all jobs: ids are unique in an engine
        self.limits = FeedLimits.of(self._step_limits.max_num_seqs, options.engine.look_ahead)
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
            ),
            sources=sources,
            lease_ttl_s=lease_ttl_s,
        )

    def _start_engine(self) -> EngineService:
        engine, limits = self._options.engine, self._step_limits
        return EngineService.start(
            self.model.runner_config,
            LoopOptions(
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                enable_prefix_caching=engine.enable_prefix_caching,
                enable_shared_attention=engine.enable_shared_attention,
                tier_shares=engine.tier_shares,
                async_scheduling=limits.device == CUDA if engine.async_scheduling is None else engine.async_scheduling,
                # The runner knows its model's, and the smaller one counts.
                max_model_len=NO_LIMIT,
            ),
            in_process=self._options.in_process,
            tokenizer_dir=self.model.directory,
            step_timeout_s=self._options.step_timeout_s,
        )


def engine_line(name: str, info: EngineInfo) -> str:
    """What was sized from what: one line at the start."""
    pool = info.pool
    tokens = (pool.num_pages - 1) * pool.page_size
    return (
        f"{name}: loaded in {info.start_s:.1f} s, {pool.bytes_per_token:,} bytes of KV per token; "
        f"page pool {pool.num_pages - 1:,} pages of {pool.page_size} = {tokens:,} tokens "
        f"({tokens * pool.bytes_per_token / 2**20:,.0f} MiB); context {info.max_model_len:,} tokens"
    )
