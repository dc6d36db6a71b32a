"""An engine that is killed while it loads, so and so often."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from nightmill_worker.scripted_engine import Script, ScriptedRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class DyingLoad(Script):
    """Picklable, as the engine process needs it."""

    graves: Path
    times: int

    def build(self) -> ScriptedRunner:
        """Die, or be like any other."""
        if len(list(self.graves.iterdir())) < self.times:
            (self.graves / str(time.monotonic_ns())).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return ScriptedRunner(self)
