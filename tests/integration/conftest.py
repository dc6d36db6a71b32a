"""A whole `nightmill run` with a fake model: in this process, or as a process that can be killed."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.integration.fake_model import fake_model, make_tokenizer

from nightmill.config import Settings
from nightmill.records import EngineOptions, JobOptions, JobSpec, ModelSpec
from nightmill.sampling import SamplingParams
from nightmill_worker.drain import Drain
from nightmill_worker.embedded import EmbeddedRun, RunOptions, RunResult
from nightmill_worker.report import Reporter, SilentReporter

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def chat_tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("chat-tokenizer"), chat=True)


@dataclass
class Bench:
    """A place for one test's input, output and store."""

    path: Path
    tokenizer_dir: Path
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def input(self) -> Path:
        return self.path / "in.parquet"

    @property
    def output(self) -> Path:
        return self.path / "out"

    def write(self, rows: int | Sequence[Any] = 0, *, row_group_size: int = 50, **columns: Sequence[Any]) -> Path:
        """An input of so many rows, or of these prompts; all columns given are added."""
        prompts = (
            [f"{10 + i % 900} {11 + i % 800} {12 + i % 700}" for i in range(rows)] if isinstance(rows, int) else rows
        )
        table = pa.table({"prompt": pa.array(prompts, pa.string()), "n": list(range(len(prompts))), **columns})
        pq.write_table(table, self.input, row_group_size=row_group_size)
        return self.input

    def run(
        self,
        *,
        fake: str = "{}",
        sampling: SamplingParams | None = None,
        options: JobOptions | None = None,
        engine: EngineOptions | None = None,
        in_process: bool = True,
        reporter: Reporter | None = None,
        drain: Drain | None = None,
        step_timeout_s: float = 60,
        **spec: Any,
    ) -> RunResult:
        """`nightmill run` by its Python side."""
        model = ModelSpec(model=f"fake:{fake}")
        job_spec = JobSpec(
            inputs=spec.pop("inputs", (str(self.input),)),
            output=str(spec.pop("output", self.output)),
            model=model,
            sampling=sampling or SamplingParams(max_tokens=6),
            **spec,
        )
        run_options = RunOptions(
            engine=engine or EngineOptions(max_num_seqs=16), in_process=in_process, step_timeout_s=step_timeout_s
        )
        loaded = fake_model(model, self.tokenizer_dir)
        run = EmbeddedRun(loaded, run_options, self.settings, reporter or SilentReporter(), drain or Drain())
        return run.run(job_spec, options or JobOptions(shard_rows=100))

    @property
    def settings(self) -> Settings:
        return Settings.from_env({"HOME": str(self.path), "NIGHTMILL_HOME": str(self.path / "home")})

    @property
    def _journal(self) -> Path:
        return self.path / "steps"

    @property
    def num_steps(self) -> int:
        """Steps that engines of spawned processes have begun."""
        return self._journal.read_bytes().count(b"\n") if self._journal.exists() else 0

    def spawn(self, *arguments: str, wrapper: Sequence[str] = (), **environment: str) -> subprocess.Popen[str]:
        """The command line as a process of its own."""
        return subprocess.Popen(
            [*wrapper, sys.executable, str(ROOT / "tests/integration/fake_model.py"), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "FAKE_TOKENIZER": str(self.tokenizer_dir),
                "NIGHTMILL_HOME": str(self.path / "home"),
                "FAKE_JOURNAL": str(self._journal),
                **self.environment,
                **environment,
            },
            start_new_session=True,
        )

    def run_arguments(self, fake: str = "{}", *more: str) -> list[str]:
        """Of `nightmill run`, for `spawn`."""
        flags = ["--model", f"fake:{fake}", "--max-tokens", "6", "--shard-rows", "100", "--max-num-seqs", "16"]
        return ["run", str(self.input), "-o", str(self.output), *flags, "--json", *more]

    def call(self, *arguments: str, wrapper: Sequence[str] = (), **environment: str) -> "Ended":
        """Spawn and wait."""
        with self.spawn(*arguments, wrapper=wrapper, **environment) as process:
            out, err = process.communicate(timeout=120)
        return Ended(process.returncode, out, err)

    def rows(self, output: Path | None = None) -> list[dict[str, Any]]:
        """All output rows, part after part, as they stand."""
        parts = sorted((output or self.output).glob("part-*.parquet"))
        return [row for part in parts for row in pq.read_table(part).to_pylist()]


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


@pytest.fixture
def bench(tmp_path: Path, tokenizer_dir: Path) -> Bench:
    return Bench(tmp_path, tokenizer_dir)


@pytest.fixture
def make_bench(tmp_path: Path, tokenizer_dir: Path) -> Callable[[str], Bench]:
    """Another place beside the first one."""

    def make(name: str) -> Bench:
        (tmp_path / name).mkdir()
        return Bench(tmp_path / name, tokenizer_dir)

    return make
