"""Makes engines ready to run: their installation, their environment, their process."""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.rivals.engine_process import EngineProcess
from bench.rivals.materials import Materials
from bench.rivals.rival import Rival
from bench.rivals.session import Entrant
from bench.rivals.venv import InstallError, ready_venv

Say = Callable[[str], None]
_WARM_UP_ROWS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """`missing` says why an engine does not take part."""

    folder: Path
    threads: int
    say: Say
    missing: dict[str, str] = field(default_factory=dict)

    def install(self, rival: Rival) -> bool:
        """True when it can run."""
        if rival.venv:
            try:
                ready_venv(self._venv(rival), rival.installs, self.say)
            except (InstallError, OSError) as error:
                self.say(f"{rival.name} cannot be installed: {error}")
                self.missing[rival.name] = f"could not be installed: {error}"
        return rival.name not in self.missing

    def entrant(self, rival: Rival, materials: Materials) -> Entrant | None:
        """Its process, not started; None when there is no form of the model that it could read."""
        model = materials.models.get(rival.model) or materials.models.get(rival.other_model)
        if model is None:
            self.missing[rival.name] = materials.missing.get(rival.model, f"no {rival.model}")
            return None
        settings: dict[str, Any] = {
            "model": str(model),
            "threads": self.threads,
            "warm_up": str(materials.tasks["W0"].file),
            "warm_up_rows": _WARM_UP_ROWS,
            **rival.settings,
        }
        process = EngineProcess(
            name=rival.name,
            python=self._venv(rival) / "bin" / "python" if rival.venv else Path(sys.executable),
            script=rival.script,
            settings=settings,
            environment=self._environment(rival),
            log=self.folder / "logs" / f"{rival.name}.log",
        )
        return Entrant(rival, process)

    def _environment(self, rival: Rival) -> Mapping[str, str]:
        names = {"cores": _cores(self.threads), "venv": str(self._venv(rival))}
        here = dict(os.environ)
        if rival.venv:
            here.pop("PYTHONPATH", None)
        here |= {
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": str(self.threads),
            **{name: value.format(**names) for name, value in rival.environment.items()},
        }
        libraries = [path.format(**names) for path in rival.preload]
        for path in libraries:
            if not Path(path).exists():
                self.say(f"{rival.name} runs without {path}, which is not there")
        found = [path for path in libraries if Path(path).exists()]
        return here | ({"LD_PRELOAD": ":".join(found)} if found else {})

    def _venv(self, rival: Rival) -> Path:
        return self.folder / "venvs" / rival.venv


def _cores(count: int) -> str:
    """The first `count` cores that this process may use, as a list for thread bindings: `0,1`."""
    return ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:count])
