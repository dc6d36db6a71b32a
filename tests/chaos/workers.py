"""Workers and the janitor of a chaos run: processes that are started again whenever they end."""

import json
import os
import signal
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from tests.chaos.verdict import MAX_SEQS

from deploy.native.ports import free_port
from deploy.native.process import Command, Process

NIGHTMILL = str(Path(sys.executable).with_name("nightmill"))
GRACE_S = 10
MOST_SHARDS = 12  # assumed of a worker that does not say how many it holds


@dataclass
class Supervised:
    """One process and its successors."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    folder: Path
    exits: list[int] = field(default_factory=list)  # of those that ended without us
    _process: Process | None = None
    _killed: bool = False

    @property
    def log(self) -> Path:
        """Of all of them, one after the other."""
        return self.folder / f"{self.name}.log"

    @property
    def pid(self) -> int | None:
        """Of the present one."""
        return self._process.pid if self._process is not None and self._process.running else None

    def tend(self) -> None:
        """Start it when it is not there."""
        if self._process is not None and self._process.running:
            return
        if self._process is not None:
            code = self._process.wait(timeout_s=5)
            if not self._killed:
                self.exits.append(code)
        self._killed = False
        command = Command(name=self.name, argv=self.argv, env=self.env, cwd=self.folder, log=self.log)
        self._process = Process(command)
        self._process.start()

    def signal(self, number: signal.Signals) -> None:
        """End it; `tend` starts the next."""
        if self._process is not None and self._process.running:
            self._killed = True
            self._process.signal(number)

    def stop(self, grace_s: float) -> None:
        """For good."""
        if self._process is not None:
            self._process.stop(grace_s=grace_s)
            self._process = None


@dataclass
class ChaosWorker(Supervised):
    """A `nightmill worker` with a scripted engine, on a machine of its own as far as it knows."""

    port: int = 0

    @property
    def shards_held(self) -> int:
        """At work in it now."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=1) as answer:
                lines = answer.read().decode().splitlines()
        except OSError:
            return MOST_SHARDS
        return next((int(float(line.split()[1])) for line in lines if line.startswith("nightmill_shards_active ")), 0)

    @property
    def engine(self) -> psutil.Process | None:
        """Its engine process."""
        try:
            children = psutil.Process(self.pid).children() if self.pid is not None else []
            return next((child for child in children if "spawn_main" in " ".join(child.cmdline())), None)
        except psutil.Error:
            return None


def make_worker(number: int, folder: Path, env: Mapping[str, str], step_s: float) -> ChaosWorker:
    """A worker whose engine keeps a journal in `folder`."""
    port = free_port()
    script = {"step_s": step_s, "journal": str(folder / f"journal-{number}")}
    argv = [
        *(NIGHTMILL, "worker", "--fake-engine", json.dumps(script), "--max-num-seqs", str(MAX_SEQS)),
        *("--grace", str(GRACE_S), "--slice", "5", "--lease-ttl", "10", "--slots", "high=2,normal=3,low=2"),
        *("--metrics-port", str(port), "--log-format", "json"),
    ]
    home = {"NIGHTMILL_HOME": str(folder / f"home-{number}"), "NIGHTMILL_LOG_LEVEL": "info", "OMP_NUM_THREADS": "1"}
    return ChaosWorker(f"worker-{number}", argv, {**os.environ, **env, **home}, folder, port=port)


def make_janitor(folder: Path, env: Mapping[str, str]) -> Supervised:
    """A `nightmill janitor` beside those that workers carry."""
    home = {"NIGHTMILL_HOME": str(folder / "home-janitor"), "NIGHTMILL_LOG_LEVEL": "info"}
    return Supervised("janitor", [NIGHTMILL, "janitor"], {**os.environ, **env, **home}, folder)
