"""A fleet for one test: real broker, real database, an object store or a folder, workers as processes."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nightmill.config import Settings
from nightmill.records import JobInfo, JobOptions, JobSpec, ModelSpec
from nightmill.ringing import ring
from nightmill.sampling import SamplingParams
from nightmill.states import TERMINAL_JOB, Tier
from nightmill.storage import open_storage
from nightmill.store import Store
from nightmill.submit import submit_job

ROOT = Path(__file__).parents[2]
WAIT_S = 120.0  # a bound against hanging, not an expectation


@dataclass
class Worker:
    """One `nightmill worker`."""

    process: subprocess.Popen[bytes]
    log_path: Path
    port: int | None = None

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def lines(self) -> list[dict[str, Any]]:
        """Its log, parsed."""
        return [json.loads(line) for line in self.log.splitlines() if line.startswith("{")]

    def wait_for_log(self, text: str, *, count: int = 1) -> None:
        wait_until(lambda: self.log.count(text) >= count or self.process.poll() is not None, f"{text!r} in the log")
        assert self.log.count(text) >= count, self.log[-4000:]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class FleetBench:
    """What a test needs; `close` ends the workers that are left."""

    path: Path
    environment: dict[str, str]
    prefix: str  # where inputs and outputs go: a folder or s3://bucket
    workers: list[Worker] = field(default_factory=list)
    _store: Store | None = None

    @property
    def settings(self) -> Settings:
        known = {name: value for name, value in self.environment.items() if not name.startswith("AWS_")}
        return Settings.from_env({"HOME": str(self.path), **known})

    @property
    def store(self) -> Store:
        if self._store is None:
            self._store = Store(self.settings.database_url)
            self._store.migrate()
        return self._store

    def start(self, script: dict[str, Any] | None = None, *flags: str, **environment: str) -> Worker:
        """A worker with a scripted engine, in a home of its own unless told otherwise."""
        number = len(self.workers)
        log_path = self.path / f"worker-{number}.log"
        command = [
            str(Path(sys.executable).with_name("nightmill")),
            "worker",
            "--fake-engine",
            json.dumps(script or {}),
        ]
        command += ["--max-num-seqs", "16", "--log-format", "json", "--grace", "20", *flags]
        home = {"NIGHTMILL_HOME": str(self.path / f"home-{number}"), "NIGHTMILL_LOG_LEVEL": "info"}
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environment, **home, "OMP_NUM_THREADS": "1", **environment},
                start_new_session=True,
            )
        self.workers.append(Worker(process, log_path))
        return self.workers[-1]

    def write(self, name: str, rows: int | Sequence[str], *, row_group_size: int = 100) -> str:
        """An input; its URI."""
        prompts = _prompts(rows) if isinstance(rows, int) else list(rows)
        table = pa.table({"prompt": pa.array(prompts, pa.string()), "n": list(range(len(prompts)))})
        uri = f"{self.prefix}/{name}.parquet"
        with open_storage(uri).stage(uri) as staged:
            pq.write_table(table, staged.file, row_group_size=row_group_size)
            staged.create()
        return uri

    def submit(
        self,
        name: str,
        rows: int | Sequence[str] = 0,
        *,
        tier: Tier = Tier.NORMAL,
        shard_rows: int = 100,
        model: str = "fake",
        max_tokens: int = 6,
        **options: Any,
    ) -> JobInfo:
        """Write an input, submit a job into an output of the same name, ring for it."""
        spec = JobSpec(
            inputs=(self.write(name, rows, row_group_size=min(shard_rows, 100)),),
            output=f"{self.prefix}/{name}-out",
            model=ModelSpec(model=model),
            sampling=SamplingParams(max_tokens=max_tokens),
        )
        job = submit_job(self.store, spec, JobOptions(tier=tier, shard_rows=shard_rows, **options))
        ring(self.store, self.settings)
        return job

    def wait(self, *jobs: JobInfo) -> list[JobInfo]:
        """Until all have ended."""
        ids = [job.job_id for job in jobs]

        def is_over() -> bool:
            assert any(worker.process.poll() is None for worker in self.workers), self.logs()
            return all(self.store.job(job_id).status in TERMINAL_JOB for job_id in ids)

        wait_until(is_over, lambda: f"{[self.store.job(job_id) for job_id in ids]} to end; logs:\n{self.logs()}")
        return [self.store.job(job_id) for job_id in ids]

    def rows(self, job: JobInfo) -> list[dict[str, Any]]:
        """Output rows, part after part, as they stand."""
        storage = open_storage(job.spec.output)
        found = []
        for info in sorted(storage.list(job.spec.output), key=lambda info: info.uri):
            if info.uri.rpartition("/")[2].startswith("part-"):
                with storage.open_input(info.uri) as file:
                    found += pq.read_table(pa.BufferReader(file.read())).to_pylist()
        return found

    def check(self, job: JobInfo, rows: int | Sequence[str], *, errors: dict[int, str] | None = None) -> None:
        """Every row once, in order, with the answer that belongs to it."""
        prompts = _prompts(rows) if isinstance(rows, int) else list(rows)
        found = self.rows(job)
        assert [row["n"] for row in found] == list(range(len(prompts)))
        expected = errors or {}
        wrong = {row["n"]: row["error_code"] for row in found if row["error_code"] != expected.get(row["n"])}
        assert not wrong
        answers = {row["n"]: row["completion"] for row in found if row["error_code"] is None}
        max_tokens = job.spec.sampling.max_tokens
        assert answers == {n: answer(prompts[n], max_tokens) for n in answers}

    def logs(self) -> str:
        return "\n\n".join(f"== {worker.log_path.name}\n{worker.log[-3000:]}" for worker in self.workers)

    def close(self) -> None:
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.kill()
        if self._store is not None:
            self._store.close()


def answer(prompt: str, max_tokens: int) -> str:
    """What the scripted engine says."""
    tokens = [int(word) for word in prompt.split()]
    length = len(tokens)
    for _ in range(max_tokens):
        tokens.append(2 + (tokens[-1] * 31 + len(tokens) * 7) % 97)
    return " ".join(str(token) for token in tokens[length:])


def wait_until(holds: Callable[[], bool], what: str | Callable[[], str], *, limit_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {limit_s:.0f} s for {what if isinstance(what, str) else what()}")
        time.sleep(0.05)


def _prompts(count: int) -> list[str]:
    return [f"{10 + i % 900} {11 + i % 800} {12 + i % 700}" for i in range(count)]
