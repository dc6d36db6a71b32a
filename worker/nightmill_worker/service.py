"""The engine as a service: a spawned process (or a thread, same code) behind two pipes and a bound.

    feeder                         │ engine process
    submit ──▶ inbox pipe ─────────┼▶ drained between steps ─▶ EngineLoop.step()
    poll   ◀── ready list ◀─ attendant thread ◀─ outbox pipe ◀─ finished, counters, last words

The attendant thread spawns the process, reads the outbox until it closes, then finds out how the process died. It
lives exactly as long as the process because PR_SET_PDEATHSIG fires when the *thread* that forked ends.
"""

import atexit
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from nightmill.errors import EngineError, ModelError, NightmillError
from nightmill_worker.engine.flight import describe_flight
from nightmill_worker.engine.options import LoopOptions
from nightmill_worker.engine.request import Finished, Request
from nightmill_worker.engine.stats import EngineStats
from nightmill_worker.engine_process import engine_main
from nightmill_worker.wire import (
    Cancel,
    CancelJob,
    Command,
    EngineInfo,
    EngineSetup,
    Entering,
    Failed,
    Ready,
    Recall,
    Report,
    Results,
    RunnerConfig,
    Started,
    Submit,
)

DEFAULT_STEP_TIMEOUT_S = 600.0
CLOSE_S = 5.0
SUBMIT_REQUESTS = 64  # in one message: the engine takes in whole messages, between two steps


class DeathCause(StrEnum):
    """How an engine ended that nobody had closed."""

    EXCEPTION = "exception"
    """A step, or the start, raised; the message is the exception's."""
    SIGNAL = "signal"
    """A fault of its own: SIGSEGV, SIGBUS, SIGABRT."""
    KILL = "kill"
    """SIGKILL: the kernel's out-of-memory killer, or a person."""
    EXIT = "exit"
    """The process exited by itself."""
    HANG = "hang"
    """No step completed for the watchdog's limit."""


class EngineDiedError(EngineError):
    """The engine process ended unexpectedly."""

    def __init__(self, cause: DeathCause, message: str, *, detail: str = "", hint: str | None = None) -> None:
        self.cause = cause
        self.detail = detail  # a traceback or stack dump; for the log, not for a row
        super().__init__(message, hint=hint)


class EngineService:
    """One engine. `submit`, `cancel`, `poll` and `close` may be called from different threads."""

    def __init__(self, setup: EngineSetup, *, max_outstanding: int) -> None:
        self._setup = setup
        self._max_outstanding = max_outstanding
        self._changed = threading.Condition()
        self._finished: list[Finished] = []
        self._started: list[int] = []
        self._entering: tuple[int, ...] = ()
        self._outstanding = 0
        self._info: EngineInfo | None = None
        self._stats: EngineStats | None = None
        self._failed: Failed | None = None
        self._error: NightmillError | None = None
        self._closing = False
        self._woken = False
        self._process: BaseProcess | None = None
        self._send_lock = threading.Lock()
        engine_inbox, self._inbox = multiprocessing.Pipe(duplex=False)
        self._outbox, engine_outbox = multiprocessing.Pipe(duplex=False)
        self._attendant = threading.Thread(
            target=self._attend, args=(engine_inbox, engine_outbox), name="engine-attendant", daemon=True
        )

    @classmethod
    def start(
        cls,
        runner_config: RunnerConfig,
        loop_options: LoopOptions,
        *,
        in_process: bool = False,
        tokenizer_dir: Path | None = None,
        step_timeout_s: float | None = DEFAULT_STEP_TIMEOUT_S,
        max_outstanding: int = 1 << 15,
    ) -> "EngineService":
        """Start the engine and wait until it is ready: `begin`, then `wait_ready`.

        Raises:
            ModelError, EngineError: The start failed; the message is the engine's own.
        """
        service = cls.begin(
            runner_config,
            loop_options,
            in_process=in_process,
            tokenizer_dir=tokenizer_dir,
            step_timeout_s=step_timeout_s,
            max_outstanding=max_outstanding,
        )
        service.wait_ready()
        return service

    @classmethod
    def begin(
        cls,
        runner_config: RunnerConfig,
        loop_options: LoopOptions,
        *,
        in_process: bool = False,
        tokenizer_dir: Path | None = None,
        step_timeout_s: float | None = DEFAULT_STEP_TIMEOUT_S,
        max_outstanding: int = 1 << 15,
    ) -> "EngineService":
        """Start the engine; it may be used once `wait_ready` has returned.

        Args:
            runner_config: Picklable; builds the runner inside the engine process.
            loop_options: The engine's limits and switches.
            in_process: Run it on a thread of this process instead. No watchdog, and a crash takes the caller along.
            tokenizer_dir: Needed for stop strings only.
            step_timeout_s: A step longer than this ends the process after dumping its stacks.
            max_outstanding: `submit` blocks while this many requests have not come back through `poll`.
        """
        dump_path = None
        if not in_process:
            handle, name = tempfile.mkstemp(prefix="nightmill-engine-", suffix=".txt")
            os.close(handle)
            dump_path = Path(name)
        setup = EngineSetup(
            runner_config=runner_config,
            loop_options=loop_options,
            tokenizer_dir=tokenizer_dir,
            parent_pid=None if in_process else os.getpid(),
            step_timeout_s=step_timeout_s,
            dump_path=dump_path,
        )
        service = cls(setup, max_outstanding=max_outstanding)
        atexit.register(service._kill)
        service._attendant.start()
        return service

    def wait_ready(self) -> None:
        """Wait until the model is loaded; an engine that cannot start, or is not waited for, is closed.

        Raises:
            ModelError, EngineError: The start failed; the message is the engine's own.
        """
        try:
            self._wait_ready()
        except BaseException:
            self.close(timeout_s=0)
            raise

    @property
    def info(self) -> EngineInfo:
        """Pool, vocabulary and process id of the started engine."""
        if self._info is None:
            raise EngineError("the engine has not started")
        return self._info

    @property
    def outstanding(self) -> int:
        """Requests submitted that have not come back through `poll`."""
        return self._outstanding

    def stats(self) -> EngineStats | None:
        """The engine's counters as last reported (at least every 0.25 s while it works); None before the first.

        `work`, what each job has had, may be 0.25 s older than the rest while the engine works.
        """
        return self._stats

    def submit(self, requests: Sequence[Request]) -> None:
        """Hand over requests, in order. Blocks while `max_outstanding` are out.

        Raises:
            EngineError: The engine is dead (`EngineDiedError` says how) or closed.
        """
        with self._changed:
            while self._outstanding and self._outstanding + len(requests) > self._max_outstanding:
                self._check_alive()
                self._changed.wait()
            self._check_alive()
            self._outstanding += len(requests)
        for start in range(0, len(requests), SUBMIT_REQUESTS):
            end = start + SUBMIT_REQUESTS
            self._send(Submit(tuple(requests[start:end]), more_follow=end < len(requests)))

    def recall(self) -> None:
        """End what has not started yet. Each comes back through `poll` once, with ABORT; what has started goes on."""
        self._send(Recall())

    def take_started(self) -> list[int]:
        """Requests that have started (ran in a step, or are about to) since the last call.

        What `poll` or `leftovers` has handed out and had started is in here before. Once the engine is dead, nothing
        ran that is not.
        """
        with self._changed:
            started, self._started = self._started, []
        return started

    @property
    def entering(self) -> tuple[int, ...]:
        """Requests that the engine is just taking in."""
        return self._entering

    def cancel(self, request_ids: Sequence[int]) -> None:
        """End these requests now. Each comes back through `poll` once, with ABORT unless it had just ended."""
        self._send(Cancel(tuple(request_ids)))

    def cancel_job(self, job_id: str) -> None:
        """The same for all requests of a job that were submitted before."""
        self._send(CancelJob(job_id))

    def poll(self, timeout_s: float) -> list[Finished]:
        """Sequences that ended since the last call; waits up to `timeout_s` for one. Empty when none did.

        What finished before a crash is handed out first; then:

        Raises:
            EngineError: The engine is dead (`EngineDiedError` says how) or closed.
        """
        with self._changed:
            if not self._finished and not self._woken and self._error is None:
                self._changed.wait(timeout_s)
            self._woken = False
            if not self._finished:
                self._check_alive()
        return self.leftovers()

    def leftovers(self) -> list[Finished]:
        """Sequences that have come back and were not handed out yet, also from a dead engine. Never waits."""
        with self._changed:
            finished, self._finished = self._finished, []
            self._outstanding -= len(finished)
            if finished:
                self._changed.notify_all()
        return finished

    def wake(self) -> None:
        """Make the present or next `poll` return at once."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """End the engine, by force after `timeout_s`. What is still running is lost. May be called twice."""
        self._closing = True
        # A hung engine with a full inbox keeps a sender inside the lock: do not wait for it.
        if timeout_s > 0 and self._send_lock.acquire(timeout=1):
            try:
                self._inbox.close()
            finally:
                self._send_lock.release()
            self._attendant.join(timeout_s)
        if self._attendant.is_alive():
            self._kill()
            self._attendant.join(CLOSE_S)
        self._inbox.close()
        atexit.unregister(self._kill)
        if self._setup.dump_path is not None:
            self._setup.dump_path.unlink(missing_ok=True)
        if self._setup.flight_path is not None:
            self._setup.flight_path.unlink(missing_ok=True)

    def __enter__(self) -> "EngineService":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the caller's side ------------------------------------------------------------------------------------------

    def _wait_ready(self) -> None:
        with self._changed:
            while self._info is None:
                if self._error is not None:
                    raise self._error
                # Timed, so that a signal handler of the main thread runs while a model loads for minutes.
                self._changed.wait(0.2)

    def _check_alive(self) -> None:
        if self._error is not None:
            raise self._error

    def _send(self, command: Command) -> None:
        try:
            with self._send_lock:
                self._inbox.send(command)
        except OSError as error:  # the pipe broke, or is closed: the attendant knows why, within moments
            with self._changed:
                self._changed.wait_for(lambda: self._error is not None, timeout=CLOSE_S)
                raise (self._error or EngineError("the engine is closed")) from error

    def _kill(self) -> None:
        process = self._process
        if process is not None and process.is_alive():
            process.kill()

    # -- the attendant thread ---------------------------------------------------------------------------------------

    def _attend(self, engine_inbox: Connection, engine_outbox: Connection) -> None:
        error: NightmillError | None = None
        try:
            body = self._start_body(engine_inbox, engine_outbox)
            self._read_reports()
            body.join(CLOSE_S)
            self._kill()
            body.join()
            error = self._obituary()
        except Exception as failure:  # noqa: BLE001 - whatever it is, the callers must hear of it
            error = EngineError(f"the engine could not be started: {failure}")
        finally:
            with self._changed:
                self._error = EngineError("the engine is closed") if self._closing else error
                self._changed.notify_all()
            self._outbox.close()

    def _start_body(self, engine_inbox: Connection, engine_outbox: Connection) -> BaseProcess | threading.Thread:
        arguments = (engine_inbox, engine_outbox, self._setup)
        if self._setup.parent_pid is None:
            thread = threading.Thread(target=engine_main, args=arguments, name="engine", daemon=True)
            thread.start()
            return thread
        # The child inherits this thread's signal mask: a Ctrl-C while it still imports must not end it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        process = multiprocessing.get_context("spawn").Process(target=engine_main, args=arguments, name="engine")
        process.start()
        self._process = process
        if self._closing:  # between the two: close() found no process to kill
            process.kill()
        # Only the child may hold these now, or its death would not close the pipes.
        engine_inbox.close()
        engine_outbox.close()
        return process

    def _read_reports(self) -> None:
        while True:
            try:
                report: Report = self._outbox.recv()
            except (EOFError, OSError):
                return
            with self._changed:
                match report:
                    case Ready(info):
                        self._info = info
                    case Results(finished, stats):
                        self._finished += finished
                        if stats.work is None and self._stats is not None:
                            stats = replace(stats, work=self._stats.work)
                        self._stats = stats
                    case Started(request_ids, finished):
                        self._started += request_ids
                        self._finished += finished
                        if not finished:
                            continue  # nobody waits for it
                    case Entering(request_ids):
                        self._entering = request_ids
                        continue
                    case Failed():
                        self._failed = report
                self._changed.notify_all()

    def _obituary(self) -> NightmillError:
        if self._failed is not None:
            return _failure(self._failed, self._read_dump())
        dump = self._read_dump()
        code = self._process.exitcode if self._process is not None else None
        if dump.startswith("Timeout ("):
            limit = self._setup.step_timeout_s
            return EngineDiedError(DeathCause.HANG, f"no engine step completed for {limit:g} s", detail=dump)
        if code is not None and code < 0:
            message = f"the engine process was killed by {signal.Signals(-code).name}"
            if -code == signal.SIGKILL:
                hint = "SIGKILL is often the kernel's out-of-memory killer: see dmesg, lower --max-num-seqs."
                return EngineDiedError(DeathCause.KILL, message, detail=dump, hint=hint)
            return EngineDiedError(DeathCause.SIGNAL, message, detail=dump)
        return EngineDiedError(DeathCause.EXIT, f"the engine process exited with code {code}", detail=dump)

    def _read_dump(self) -> str:
        path, flight = self._setup.dump_path, self._setup.flight_path
        stacks = path.read_text(errors="replace") if path is not None and path.exists() else ""
        state = describe_flight(flight) if flight is not None else ""
        return "\n".join(text for text in (stacks, state) if text)


def _failure(failed: Failed, dump: str) -> NightmillError:
    if failed.code == ModelError.code:
        return ModelError(failed.message, hint=failed.hint)
    if failed.starting:
        return EngineError(f"the engine could not start: {failed.message}", hint=failed.hint)
    return EngineDiedError(
        DeathCause.EXCEPTION, failed.message, detail=f"{failed.traceback}\n{dump}".rstrip(), hint=failed.hint
    )
