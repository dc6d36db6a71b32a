"""The engine's side of the pipes: build a runner, then drain inbox → step → report until the inbox closes."""

import ctypes
import faulthandler
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

from nightmill.errors import EngineError, NightmillError
from nightmill_worker.engine.flight import FlightRecorder
from nightmill_worker.engine.loop import EngineLoop
from nightmill_worker.engine.request import Finished
from nightmill_worker.wire import (
    Cancel,
    CancelJob,
    Command,
    EngineInfo,
    EngineSetup,
    Entering,
    ExplainsItsStart,
    Failed,
    KnowsItsContext,
    Ready,
    Recall,
    Report,
    Results,
    Started,
    Submit,
)

REPORT_EVERY_S = 0.01  # finished sequences wait this long for company
STATS_EVERY_S = 0.25  # counters are sent at least this often while there is work
REPORT_ROWS = 64
TAKE_IN_S = 0.002  # between two steps; what is left in the inbox comes after the next one
GC_THRESHOLD = 50_000
_PR_SET_PDEATHSIG = 1


def engine_main(inbox: Connection, outbox: Connection, setup: EngineSetup) -> None:
    """Entry point of the engine process (or thread). Ends (a thread: returns) when the inbox closes; never raises."""
    if setup.parent_pid is not None:
        _become_child(setup)
    starting = True
    loop: EngineLoop | None = None
    try:
        started = time.monotonic()
        runner = setup.runner_config.build()
        options = setup.loop_options
        if isinstance(runner, KnowsItsContext):
            options = replace(options, max_model_len=min(options.max_model_len, runner.max_model_len))
        loop = EngineLoop(runner, options, _detokenizer(setup.tokenizer_dir))
        if setup.flight_path is not None:
            loop.flight = FlightRecorder(setup.flight_path, loop.table, loop.queue, loop.pool)
        info = EngineInfo(
            pool=runner.pool,
            vocab_size=runner.vocab_size,
            max_model_len=options.max_model_len,
            pid=os.getpid(),
            start_s=time.monotonic() - started,
            notes=runner.start_notes if isinstance(runner, ExplainsItsStart) else (),
        )
        if setup.parent_pid is not None:
            tune_gc()
        outbox.send(Ready(info))
        starting = False
        _Serving(loop, inbox, outbox, _Watchdog(setup)).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the feeder closed the pipes, or is gone: nobody is left to tell
    except Exception as error:  # noqa: BLE001 - the feeder decides what a failure means, so it gets all of it
        _last_words(outbox, error, starting=starting)
        if setup.parent_pid is not None:
            # No clean-up after a failure: freeing a broken device can hang, and the system frees it all anyway.
            outbox.close()
            os._exit(1)
    finally:
        if loop is not None:
            loop.close()
        inbox.close()
        outbox.close()
    if setup.parent_pid is not None:
        # As after a failure: taking a model apart piece by piece would only keep the feeder waiting.
        os._exit(0)


def tune_gc() -> None:
    """Keep the cyclic collector from walking everything that waits, in the midst of a step.

    What is there now (modules, the model) is never looked at again. The engine's own objects make few cycles, so
    collecting seldom costs little memory; 100,000 waiting requests in the old generation cost 100 ms a time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 20, 1000)


class _Serving:
    """The steady state: take what came in, step, report what ended."""

    def __init__(self, loop: EngineLoop, inbox: Connection, outbox: Connection, watchdog: "_Watchdog") -> None:
        self._loop = loop
        self._inbox = inbox
        self._outbox = outbox
        self._watchdog = watchdog
        self._finished: list[Finished] = []
        self._reported_at = 0.0
        self._worked_out_at = 0.0  # what each job has had
        self._more_follow = False
        loop.on_start = self._tell_started

    def run(self) -> None:
        """Serve until the inbox closes (EOFError)."""
        while True:
            if not self._loop.has_work:
                self._watchdog.rest()
                self._report()
                self._obey(self._inbox.recv())
            self._take_in()
            self._watchdog.arm()
            self._finished += self._loop.step()
            waited = time.monotonic() - self._reported_at
            if len(self._finished) >= REPORT_ROWS or waited > (REPORT_EVERY_S if self._finished else STATS_EVERY_S):
                self._report()

    def _take_in(self) -> None:
        """Obey what is in the inbox, for a moment; while nothing runs, all of it and all that is announced."""
        deadline = time.monotonic() + TAKE_IN_S
        while not self._loop.is_running or time.monotonic() < deadline:
            if not (self._inbox.poll(0) or (self._more_follow and not self._loop.is_running)):
                return
            self._obey(self._inbox.recv())

    def _obey(self, command: Command) -> None:
        match command:
            case Submit(requests, more_follow):
                self._tell(Entering(tuple(request.request_id for request in requests)))
                for request in requests:
                    self._loop.add(request)
                self._tell(Entering(()))
                self._more_follow = more_follow
            case Cancel(request_ids):
                self._loop.cancel(request_ids)
            case CancelJob(job_id):
                self._loop.cancel_job(job_id)
            case Recall():
                self._loop.recall()

    def _tell_started(self, request_ids: Sequence[int]) -> None:
        if self._finished and time.monotonic() - self._reported_at > REPORT_EVERY_S:
            self._report()
        self._tell(Started(tuple(request_ids), tuple(self._finished)))
        self._finished.clear()

    def _tell(self, report: Report) -> None:
        self._outbox.send(report)

    def _report(self) -> None:
        self._reported_at = time.monotonic()
        is_due = self._reported_at - self._worked_out_at > STATS_EVERY_S or not self._loop.has_work
        if is_due:
            self._worked_out_at = self._reported_at
        self._tell(Results(tuple(self._finished), self._loop.stats(with_work=is_due)))
        self._finished.clear()


class _Watchdog:
    """Dumps every stack and ends the process when no step completes for `step_timeout_s`.

    faulthandler's timer is a C thread: it works while a kernel hangs with the interpreter lock held. Arming starts a
    thread, so it is renewed at an eighth of the limit rather than at every step; the effective limit is 7/8 to 1 of it.
    """

    def __init__(self, setup: EngineSetup) -> None:
        self._limit_s = setup.step_timeout_s if setup.parent_pid is not None else None
        self._file: IO[str] | None = None
        if self._limit_s is not None and setup.dump_path is not None:
            self._file = setup.dump_path.open("a")
        self._armed_at: float | None = None

    def arm(self) -> None:
        """A step is about to start."""
        if self._limit_s is None:
            return
        now = time.monotonic()
        if self._armed_at is None or now - self._armed_at > self._limit_s / 8:
            faulthandler.dump_traceback_later(self._limit_s, exit=True, file=self._file or sys.stderr)
            self._armed_at = now

    def rest(self) -> None:
        """Nothing to do: waiting is not hanging."""
        if self._armed_at is not None:
            faulthandler.cancel_dump_traceback_later()
            self._armed_at = None


class _LazyDetokenizer:
    """Loads the tokenizer when the first request with a stop string needs text."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @cached_property
    def _decode(self) -> Callable[[Sequence[int]], str]:
        from nightmill_worker.feed.tokenizer import Tokenizer

        return Tokenizer.load(self._directory).decode

    def __call__(self, token_ids: Sequence[int]) -> str:
        return self._decode(token_ids)


def _detokenizer(directory: Path | None) -> Callable[[Sequence[int]], str] | None:
    return None if directory is None else _LazyDetokenizer(directory)


def _become_child(setup: EngineSetup) -> None:
    """Die with the parent; leave Ctrl-C to it; keep its stdout clean; leave a stack behind after a crash."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != setup.parent_pid:  # it died before the line above
        os._exit(1)
    os.dup2(2, 1)  # stdout is data, and this process has none
    if setup.dump_path is not None:
        faulthandler.enable(setup.dump_path.open("a"), all_threads=True)


def _last_words(outbox: Connection, error: Exception, *, starting: bool) -> None:
    code = error.code if isinstance(error, NightmillError) else EngineError.code
    message = error.message if isinstance(error, NightmillError) else f"{type(error).__name__}: {error}".strip()
    hint = error.hint if isinstance(error, NightmillError) else None
    words = Failed(starting, code, message, hint, "".join(traceback.format_exception(error)))
    try:
        outbox.send(words)
    except OSError:
        traceback.print_exception(error)  # the feeder is gone; stderr is all that is left
