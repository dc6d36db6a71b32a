"""`nightmill run`: a whole job in this process, without services. Same feeder, engine, store and commit as a fleet's.

submit or resume → take back what the dead held → engine → shards, several at once → close, finalize
"""

import signal
from dataclasses import dataclass
from functools import partial

from nightmill.cli.planning_view import PlanningLines
from nightmill.config import Settings
from nightmill.errors import ErrorBudgetExceededError
from nightmill.janitor import sweep
from nightmill.job_flags import ignored_options
from nightmill.output.closer import wind_up
from nightmill.output.manifest import require_parts
from nightmill.records import JobInfo, JobOptions, JobSpec
from nightmill.states import TERMINAL_JOB, JobStatus
from nightmill.storage import open_storage
from nightmill.store import Store
from nightmill.submit import submit_job
from nightmill.validate import check_sources
from nightmill.worker_lock import WorkerLock, new_worker_id
from nightmill_worker.drain import Drain, InterruptedRunError
from nightmill_worker.engine_session import EngineSession, engine_line
from nightmill_worker.engine_start import EarlyEngine, RunOptions
from nightmill_worker.heartbeat import Heartbeat
from nightmill_worker.job_feed import JobFeed
from nightmill_worker.loaded_model import LoadedModel
from nightmill_worker.report import Reporter, RunSummary
from nightmill_worker.run_meter import RunMeter
from nightmill_worker.shard_crew import ShardCrew
from nightmill_worker.supervisor import EngineSupervisor

__all__ = ["EmbeddedRun", "LoadedModel", "RunOptions", "RunResult"]

LOOK_S = 0.2  # between looks at progress, signals and finished shards
JANITOR_S = 2.0  # between looks for what other processes left behind


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run ended."""

    job: JobInfo
    summary: RunSummary


class EmbeddedRun:
    """One `nightmill run`. Make it and call `run` once, on the main thread."""

    def __init__(
        self,
        model: LoadedModel,
        run_options: RunOptions,
        settings: Settings,
        reporter: Reporter,
        drain: Drain,
        early: EarlyEngine | None = None,
    ) -> None:
        """`early`: an engine of this model that has begun to load, for the first one that the job needs."""
        self._model = model
        self._run_options = run_options
        self._settings = settings
        self._reporter = reporter
        self._drain = drain
        self._early = early
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
                progress = PlanningLines(self._reporter.phase)
                check = partial(check_sources, progress=progress)
                job = submit_job(
                    self._store, spec, options, model_digest=self._model.digest, check=check, progress=progress
                )
                for line in ignored_options(options, job):
                    self._reporter.note(line)
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
            session = EngineSession(self._model, self._run_options, self._early)
        supervisor = session.supervisor
        heartbeat = Heartbeat(self._store, worker_id).start()
        try:
            info = supervisor.service.info
            for note in (engine_line(self._model.name, info), *info.notes):
                self._reporter.note(note)
            if self._model.cores is not None:
                self._reporter.note(str(self._model.cores))
            crew = ShardCrew(supervisor, heartbeat, self._drain)
            try:
                feed = JobFeed(crew, supervisor, session.job_context(job, self._store), self._drain, worker_id)
                self._watch(feed, crew, supervisor)
            finally:
                crew.stop()
                self._meter.end(crew, supervisor)
        finally:
            heartbeat.close()
            session.close()
        if self._drain.requested and not self._wind_up(job, worker_id):
            raise self._interruption(job)

    def _watch(self, feed: JobFeed, crew: ShardCrew, supervisor: EngineSupervisor) -> None:
        job = feed.job
        limit = job.options.max_failed_rows
        self._meter.begin()
        told = False
        while feed.take_turn():
            progress = self._meter.look(crew, supervisor, draining=self._drain.requested)
            self._reporter.progress(progress)
            if limit is not None and progress.rows_failed > limit:
                message = f"{progress.rows_failed:,} rows failed; --max-failed-rows allows {limit:,}"
                self._store.fail_job(job.job_id, ErrorBudgetExceededError.code, message)
                feed.stop()
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
