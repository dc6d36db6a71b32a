"""An engine in a process of its own: started once, asleep until it is told to run. The child's half: children/."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_CHILDREN = Path(__file__).parent / "children"


class EngineError(Exception):
    """The engine did not load, ended, was too slow, or answered nonsense; the message says which, for the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What an engine says when it has loaded."""

    load_s: float
    """Inside the child: from having imported the engine to being able to answer."""
    start_s: float
    """From starting the process to the end of its warm-up: what a one-shot job waits."""
    versions: dict[str, str]
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One timed run."""

    seconds: float
    tokens: list[list[int]]  # by row
    detail: dict[str, float]


@dataclass(kw_only=True)
class EngineProcess:
    """The driver's end of a child.

    Args:
        script: A file of children/.
        settings: For the child, see children/answering.py.
        environment: All of the child's environment.
        log: Takes what the engine prints.
    """

    name: str
    python: Path
    script: str
    settings: Mapping[str, Any]
    environment: Mapping[str, str]
    log: Path
    _child: "subprocess.Popen[str] | None" = field(default=None, init=False)
    _replies: "queue.Queue[str | None]" = field(default_factory=queue.Queue, init=False)

    @property
    def pid(self) -> int:
        """Of the running child."""
        if self._child is None:
            raise EngineError(f"{self.name} is not running")
        return self._child.pid

    def start(self, limit_s: float) -> Ready:
        """Start the child and wait for its engine.

        Raises:
            EngineError: it did not load within `limit_s`.
        """
        started = time.perf_counter()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("w") as log:
            self._child = subprocess.Popen(
                [str(self.python), str(_CHILDREN / self.script), json.dumps(dict(self.settings))],
                env=dict(self.environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                process_group=0,  # what it starts ends with it
            )
        threading.Thread(target=self._listen, args=(self._child,), daemon=True).start()
        ready = self._expect("ready", limit_s)
        return Ready(
            load_s=ready["load_s"],
            start_s=time.perf_counter() - started,
            versions=ready["versions"],
            settings=ready["settings"],
        )

    def prepare(self, rows: Path, limit: int | None, limit_s: float) -> None:
        """Have it read rows and forget earlier ones; not timed."""
        self._tell({"do": "prepare", "rows": str(rows), "limit": limit})
        self._expect("prepared", limit_s)

    def run(self, limit_s: float) -> Answer:
        """Have it answer the rows it has prepared for."""
        self._tell({"do": "run"})
        answer = self._expect("answer", limit_s)
        return Answer(seconds=answer["seconds"], tokens=answer["tokens"], detail=answer["detail"])

    def stop(self, grace_s: float = 5.0) -> None:
        """End the child, with all that it started; it may take `grace_s` to end by itself."""
        child = self._child
        if child is None:
            return
        with contextlib.suppress(OSError):
            if child.stdin is not None:
                child.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=grace_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        self._child = None

    def _listen(self, child: "subprocess.Popen[str]") -> None:
        assert child.stdout is not None
        with child.stdout as lines:
            for line in lines:
                self._replies.put(line)
        self._replies.put(None)

    def _tell(self, order: Mapping[str, Any]) -> None:
        child = self._child
        if child is None or child.stdin is None:
            raise EngineError("is not running")
        try:
            child.stdin.write(json.dumps(dict(order)) + "\n")
            child.stdin.flush()
        except OSError as error:
            raise EngineError(self._ended()) from error

    def _expect(self, kind: str, limit_s: float) -> dict[str, Any]:
        try:
            line = self._replies.get(timeout=limit_s)
        except queue.Empty:
            self.stop(grace_s=0)
            raise EngineError(f"no answer within {limit_s:.0f} s; killed") from None
        if line is None:
            raise EngineError(self._ended())
        message: dict[str, Any] = json.loads(line)
        if message["kind"] == "failed":
            self.stop()
            raise EngineError(str(message["error"]))
        if message["kind"] != kind:
            self.stop()
            raise EngineError(f"answered {message['kind']!r} when {kind!r} was due")
        return message

    def _ended(self) -> str:
        code = self._child.wait() if self._child is not None else None
        last = _last_line(self.log)
        self.stop()
        return f"the process ended with exit code {code}; its last line: {last}"


def _last_line(log: Path) -> str:
    lines: Sequence[str] = log.read_text(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "none")
