"""Worker processes that compile, each with a triton of the asked version, a fresh cache and no interpreter."""

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from nightmill_kernels.check.build import KernelBuild, SpecKey


class WorkerError(RuntimeError):
    """A worker process died; the message has what it said last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """What there is to compile."""

    triton: str
    specs: tuple[SpecKey, ...]
    forgotten: tuple[str, ...]  # kernels in no spec


class Worker:
    """One process; used by one thread at a time."""

    def __init__(self, modules: Sequence[str], triton_dir: Path | None, cache: Path) -> None:
        """`triton_dir`: a folder with a triton of its own; None: the installed one."""
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed in close()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "nightmill_kernels.check.worker", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=_environment(triton_dir, cache),
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests: IO[str] = self._process.stdin
        self._answers: IO[str] = self._process.stdout
        hello = self._answer()
        self.catalogue = Catalogue(
            triton=hello["triton"],
            specs=tuple(SpecKey(**key) for key in hello["specs"]),
            forgotten=tuple(hello["forgotten"]),
        )

    def build(self, key: SpecKey, arch: int) -> KernelBuild:
        """Compile one kernel.

        Raises:
            WorkerError: The process died.
        """
        with suppress(BrokenPipeError):  # then its last words are the answer
            self._requests.write(json.dumps({"module": key.module, "index": key.index, "arch": arch}) + "\n")
            self._requests.flush()
        return KernelBuild(**self._answer())

    def close(self) -> None:
        """End the process."""
        for pipe in (self._requests, self._answers):
            with suppress(BrokenPipeError):
                pipe.close()
        self._process.wait()
        self._log.close()

    def _answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        code = self._process.wait()
        self._log.seek(0)
        raise WorkerError(f"the compiling process ended with status {code}:\n{self._log.read()[-2000:]}")


class Farm:
    """A few workers with one triton."""

    def __init__(self, modules: Sequence[str], triton_dir: Path | None, jobs: int) -> None:
        self._cache = tempfile.TemporaryDirectory(prefix="nightmill-kernels-check-")
        self._workers: list[Worker] = []
        try:
            for number in range(jobs):
                self._workers.append(Worker(modules, triton_dir, Path(self._cache.name) / str(number)))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Farm":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def catalogue(self) -> Catalogue:
        """What there is to compile."""
        return self._workers[0].catalogue

    def build(self, wanted: Sequence[tuple[SpecKey, int]], done: Callable[[KernelBuild], None]) -> list[KernelBuild]:
        """Compile (spec, arch) pairs and return them in order; `done` hears of each, from any thread.

        Raises:
            WorkerError: A worker died.
        """
        todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        for index in range(len(wanted)):
            todo.put(index)
        built: dict[int, KernelBuild] = {}
        errors: list[WorkerError] = []
        threads = [
            threading.Thread(target=_drain, args=(worker, wanted, todo, built, errors, done))
            for worker in self._workers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [built[index] for index in range(len(wanted))]

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.close()
        self._cache.cleanup()


def _drain(
    worker: Worker,
    wanted: Sequence[tuple[SpecKey, int]],
    todo: "queue.SimpleQueue[int]",
    built: dict[int, KernelBuild],
    errors: list[WorkerError],
    done: Callable[[KernelBuild], None],
) -> None:
    while not errors:
        try:
            index = todo.get_nowait()
        except queue.Empty:
            return
        try:
            built[index] = worker.build(*wanted[index])
        except WorkerError as error:
            errors.append(WorkerError(f"{wanted[index][0].name} for sm_{wanted[index][1]}: {error}"))
            return
        done(built[index])


def _environment(triton_dir: Path | None, cache: Path) -> dict[str, str]:
    """Ours, without what would change what is compiled."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    env |= {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    if triton_dir is not None:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(triton_dir), env.get("PYTHONPATH", "")]))
    return env
