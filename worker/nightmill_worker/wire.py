"""What the feeder and the engine process say to each other, over two one-way pipes.

The engine reads its inbox between steps and never waits for it while there is work. A closed inbox means: stop.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from nightmill_worker.engine.options import LoopOptions
from nightmill_worker.engine.request import Finished, Request
from nightmill_worker.engine.stats import EngineStats
from nightmill_worker.engine.step import PoolShape, Runner


class RunnerConfig(Protocol):
    """What a runner is built from. It is pickled to the engine process, which builds the runner there."""

    def build(self) -> Runner:
        """Load weights, allocate the pool."""
        ...


@runtime_checkable
class KnowsItsContext(Protocol):
    """A runner with a limit of its own; the engine's `max_model_len` never exceeds it."""

    max_model_len: int


@runtime_checkable
class ExplainsItsStart(Protocol):
    """A runner that has something to say about how it was set up: lines for whoever started the engine."""

    start_notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """Everything the engine process is started with."""

    runner_config: RunnerConfig
    loop_options: LoopOptions
    tokenizer_dir: Path | None  # for stop strings; None: requests with stop strings are refused by the loop
    parent_pid: int | None  # None: in-process, a thread
    step_timeout_s: float | None  # None: no watchdog
    dump_path: Path | None  # where a crash or the watchdog writes every thread's stack

    @property
    def flight_path(self) -> Path | None:
        """Where the engine notes what it is doing."""
        return None if self.dump_path is None else self.dump_path.with_suffix(".flight")


@dataclass(frozen=True, slots=True)
class Submit:
    """Feeder → engine: run these."""

    requests: tuple[Request, ...]
    more_follow: bool = False  # at once: an idle engine waits for them, so that it plans with all of them


@dataclass(frozen=True, slots=True)
class Cancel:
    """Feeder → engine: end these now; each still comes back once, with ABORT."""

    request_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CancelJob:
    """Feeder → engine: the same for all requests of a job."""

    job_id: str


@dataclass(frozen=True, slots=True)
class Recall:
    """Feeder → engine: end, with ABORT, what has never started; what has goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What the feeder learns of a started engine."""

    pool: PoolShape
    vocab_size: int
    max_model_len: int  # tokens a sequence may have
    pid: int
    start_s: float  # from the process's first line to ready
    notes: tuple[str, ...] = ()  # see ExplainsItsStart


@dataclass(frozen=True, slots=True)
class Ready:
    """Engine → feeder: the model is loaded and the pool allocated."""

    info: EngineInfo


@dataclass(frozen=True, slots=True)
class Results:
    """Engine → feeder: sequences that ended since the last message, and the counters."""

    finished: tuple[Finished, ...]
    stats: EngineStats  # with `work` every now and then only


@dataclass(frozen=True, slots=True)
class Entering:
    """Engine → feeder: these are being taken in, one by one, until the next message: a death now is one of theirs."""

    request_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Started:
    """Engine → feeder, before the step that runs them for the first time. A pipe outlives its writer: whatever kills
    the engine, the feeder knows who ran."""

    request_ids: tuple[int, ...]
    finished: tuple[Finished, ...] = ()  # whose places they take: finished rows that nobody knows of are lost too


@dataclass(frozen=True, slots=True)
class Failed:
    """Engine → feeder: the last words of an engine that ends by an exception."""

    starting: bool  # before Ready
    code: str  # a NightmillError's code, else "engine_error"
    message: str
    hint: str | None
    traceback: str


Command = Submit | Cancel | CancelJob | Recall
Report = Ready | Results | Entering | Started | Failed
