"""`nightmill run`: a whole job in this process, without services. Same feeder, engine, store and commit as a fleet's.

submit or resume → take back what the dead held → engine → shards, several at once → close, finalize
"""

import signal
from dataclasses import dataclass
from pathlib import Path

from nightmill.config import Settings
from nightmill.errors import ErrorBudgetExceededError
from nightmill.janitor import sweep
from nightmill.output.closer import wind_up
from nightmill.output.folder import OutputFolder
from nightmill.output.manifest import require_parts
from nightmill.records import EngineOptions, JobInfo, JobOptions, JobSpec
from nightmill.rows import job_source_schema
from nightmill.states import TERMINAL_JOB, JobStatus
from nightmill.storage import open_storage
from nightmill.store import Store
from nightmill.submit import submit_job
from nightmill.validate import plan_input
from nightmill.worker_lock import WorkerLock, new_worker_id
from nightmill_worker.drain import Drain, InterruptedRunError
from nightmill_worker.engine.options import LoopOptions
from nightmill_worker.feed.requests import RequestMaker
from nightmill_worker.feed.tokenizer import Tokenizer
from nightmill_worker.heartbeat import Heartbeat
from nightmill_worker.report import Reporter, RunSummary
from nightmill_worker.run_meter import RunMeter
from nightmill_worker.service import DEFAULT_STEP_TIMEOUT_S, EngineService
from nightmill_worker.shard import JobContext
from nightmill_worker.shard_crew import ShardCrew
from nightmill_worker.supervisor import EngineSupervisor, FeedLimits
from nightmill_worker.wire import EngineInfo, RunnerConfig

LOOK_S = 0.2  # between looks at progress, signals and finished shards
JANITOR_S = 2.0  # between looks for what other processes left behind
DEFAULT_BATCHED_TOKENS = 512  # tokens in a step, on a CPU: a step of 50–100 ms for a small model
NO_LIMIT = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """What the feeder needs of a model."""

    name: str  # value of the `model` column
    digest: str | None
    directory: Path  # of the tokenizer; the engine reads it for stop strings
    tokenizer: Tokenizer
    runner_config: RunnerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How this process runs a job; nothing in here changes an answer."""

    engine: EngineOptions
    in_process: bool = False
    step_timeout_s: float = DEFAULT_STEP_TIMEOUT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run ended."""

    job: JobInfo
    summary: RunSummary


class EmbeddedRun:
    """One `nightmill run`. Make it and call `run` once, on the main thread."""

    def __init__(
        self, model: LoadedModel, run_options: RunOptions, settings: Settings, reporter: Reporter, drain: Drain
    ) -> None:
        self._model = model
        self._run_options = run_options
        self._settings = settings
        self._reporter = reporter
        self._drain = drain
        self._store = Store(settings.database_url)
        self._meter = RunMeter()

    def run(self, spec: JobSpec, options: JobOptions) -> RunResult:
        """Run the job to its end, or resume it; a job that has ended comes back as it is.

        Raises:
            NightmillError: It could not be submitted, or reading, writing or the engine failed. What is finished
                stays, and the same call resumes.
            InterruptedRunError: Stopped by a signal; the same.
        """
        try:
            self._store.migrate()
            with self._drain.breakable():
                self._reporter.phase("planning")
                # First: an output taken away from a worker that is dead may be taken.
                sweep(self._store, self._settings.workers_dir)
                job = submit_job(self._store, spec, options, model_digest=self._model.digest, check=_check)
            self._meter.start_from(self._store.shard_results(job.job_id), job)
            if job.status not in TERMINAL_JOB:
                with WorkerLock(self._settings.workers_dir, new_worker_id()) as lock:
                    sweep(self._store, self._settings.workers_dir)
                    self._carry_on(job, lock.worker_id)
            elif job.status is JobStatus.COMPLETED:
                require_parts(open_storage(spec.output), self._store.shard_results(job.job_id))
            job = self._store.job(job.job_id)
            return RunResult(job=job, summary=self._meter.summary(job))
        finally:
            self._store.close()

    def _carry_on(self, job: JobInfo, worker_id: str) -> None:
        while not self._wind_up(job, worker_id):
            if self._store.available_shards(1, job.job_id):
                self._run_shards(job, worker_id)
            else:
                self._drain.check()
                self._reporter.phase("waiting for shards that another process holds")
                self._drain.wait(JANITOR_S)
            sweep(self._store, self._settings.workers_dir)

    def _wind_up(self, job: JobInfo, worker_id: str) -> bool:
        return wind_up(self._store, job.job_id, worker_id, self._model.name)

    def _run_shards(self, job: JobInfo, worker_id: str) -> None:
        with self._drain.breakable():
            self._reporter.phase(f"loading {self._model.name}")
            supervisor = EngineSupervisor(self._start_engine, FeedLimits.of(self._run_options.engine.max_num_seqs))
        heartbeat = Heartbeat(self._store, worker_id).start()
        try:
            self._reporter.note(engine_line(self._model.name, supervisor.service.info))
            crew = ShardCrew(self._context(job, supervisor), supervisor, heartbeat, self._drain, worker_id)
            try:
                self._watch(job, crew, supervisor)
            finally:
                crew.stop()
                self._meter.end(crew, supervisor)
        finally:
            heartbeat.close()
            supervisor.close()
        if self._drain.requested and not self._wind_up(job, worker_id):
            raise self._interruption(job)

    def _watch(self, job: JobInfo, crew: ShardCrew, supervisor: EngineSupervisor) -> None:
        limit = job.options.max_failed_rows
        self._meter.begin()
        told = False
        while crew.take_turn():
            progress = self._meter.look(crew, supervisor, draining=self._drain.requested)
            self._reporter.progress(progress)
            if limit is not None and progress.rows_failed > limit:
                message = f"{progress.rows_failed:,} rows failed; --max-failed-rows allows {limit:,}"
                self._store.fail_job(job.job_id, ErrorBudgetExceededError.code, message)
                crew.stop()
            if self._drain.requested and not told:
                told = True
                supervisor.stop_admitting()
                self._reporter.note("stopping: rows that run may finish; once more (Ctrl-C) stops at once")
            crew.wait(LOOK_S)

    def _interruption(self, job: JobInfo) -> InterruptedRunError:
        rows = self._store.job(job.job_id).rows
        finished = self._meter.rows_finished
        number = self._drain.number or signal.SIGINT
        return InterruptedRunError(
            number,
            f"stopped by {signal.Signals(number).name}: {finished:,} of {rows.total:,} rows are finished and kept",
        )

    def _start_engine(self) -> EngineService:
        engine = self._run_options.engine
        batched = engine.max_num_batched_tokens or max(DEFAULT_BATCHED_TOKENS, engine.max_num_seqs)
        return EngineService.start(
            self._model.runner_config,
            LoopOptions(
                max_num_seqs=engine.max_num_seqs,
                max_num_batched_tokens=batched,
                enable_prefix_caching=engine.enable_prefix_caching,
                enable_shared_attention=engine.enable_shared_attention,
                # The runner knows its model's, and the smaller one counts.
                max_model_len=NO_LIMIT,
            ),
            in_process=self._run_options.in_process,
            tokenizer_dir=self._model.directory,
            step_timeout_s=self._run_options.step_timeout_s,
        )

    def _context(self, job: JobInfo, supervisor: EngineSupervisor) -> JobContext:
        spec = job.spec
        tokenizer = self._model.tokenizer
        if "strftime_now" in tokenizer.template_source:
            # A prompt with today's date in it must be the same when the job is resumed on another day.
            tokenizer = Tokenizer.load(self._model.directory, now=job.created_at)
        return JobContext(
            job=job,
            store=self._store,
            storage=open_storage(spec.output),
            folder=OutputFolder(spec.output, job.job_id),
            source_schema=job_source_schema(self._store.sources(job.job_id), spec),
            model_name=self._model.name,
            tokenizer=tokenizer,
            maker=RequestMaker(
                tokenizer,
                spec,
                job_id=job.job_id,
                tier=job.options.tier,
                max_model_len=supervisor.service.info.max_model_len,
            ),
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


def _check(spec: JobSpec, sources: object) -> None:
    """Refuse an input that does not fit before anything is written."""
    plan_input(spec)
