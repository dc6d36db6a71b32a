"""A runner for tests of what surrounds the engine: cheap, deterministic, and lethal on request.

The token drawn is a function of the last token and its position, so answers do not depend on batch mates. A trap is a
prompt token that makes the step that computes it go wrong; `budget_dir` limits how often, over all processes.
"""

import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from nightmill.errors import ModelError
from nightmill_worker.engine.step import PoolShape, StepOutput, StepPlan

EXIT, KILL, RAISE, HANG, SEGV = "exit", "kill", "raise", "hang", "segv"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedConfig:
    """Picklable; `build` makes the runner."""

    traps: dict[int, str] = field(default_factory=dict)  # token id → what happens
    vocab_size: int = 1000
    num_pages: int = 4096
    page_size: int = 16
    max_model_len: int = 256
    step_s: float = 0.0
    load_s: float = 0.0
    fail_to_build: str | None = None  # model | memory | exit
    deaths_dir: Path | None = None  # a file for every death
    max_deaths: int | None = None  # no trap springs after so many (needs deaths_dir)
    die_every_step: bool = False
    journal: Path | None = None  # grows by a byte with every step

    def build(self) -> "ScriptedRunner":
        """Make the runner, or fail as told."""
        if self.fail_to_build == "model":
            raise ModelError("no such model here", hint="give another --model")
        if self.fail_to_build == "memory":
            raise MemoryError("cannot allocate 64 GiB for the page pool")
        if self.fail_to_build == "exit":
            os._exit(7)
        time.sleep(self.load_s)
        return ScriptedRunner(self)


class ScriptedRunner:
    """See the module."""

    def __init__(self, config: ScriptedConfig) -> None:
        self._config = config
        self._traps = np.array(sorted(config.traps), dtype=np.int64)
        self.pool = PoolShape(num_pages=config.num_pages, page_size=config.page_size, bytes_per_token=64)
        self.vocab_size = config.vocab_size
        self.max_model_len = config.max_model_len

    def run(self, plan: StepPlan) -> StepOutput:
        if self._config.journal is not None:
            with self._config.journal.open("ab") as journal:
                journal.write(b".")
        if self._config.step_s:
            time.sleep(self._config.step_s)
        sprung = plan.token_ids[np.isin(plan.token_ids, self._traps)] if len(self._traps) else ()
        if len(sprung):
            self._spring(self._config.traps[int(sprung[0])])
        if self._config.die_every_step:
            self._spring(EXIT)
        last = plan.token_ids[plan.sample.token_index].astype(np.int64)
        tokens = 2 + (last * 31 + plan.sample.position * 7) % 97
        return StepOutput(tokens=tokens.astype(np.int32))

    def _spring(self, what: str) -> None:
        deaths = self._config.deaths_dir
        if deaths is not None:
            if self._config.max_deaths is not None and len(list(deaths.iterdir())) >= self._config.max_deaths:
                return
            (deaths / f"{time.monotonic_ns()}-{os.getpid()}").touch()
        if what == EXIT:
            os._exit(3)
        if what == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        if what == SEGV:
            os.kill(os.getpid(), signal.SIGSEGV)
        if what == HANG:
            time.sleep(3600)
        raise RuntimeError("CUDA out of memory: tried to allocate 2 GiB")

    def close(self) -> None:
        pass
