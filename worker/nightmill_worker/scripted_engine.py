"""An engine without a model, for tests and chaos: a cheap, deterministic engine that goes wrong on request.

`nightmill worker --fake-engine '{"step_s": 0.01}'` serves jobs of any model name. Prompts are numbers, one token each
("12 7" is [12, 7]; any other word is 1), and so are completions. The token drawn is a function of the last token and
its position, so an answer does not depend on batch mates, attempts or workers. A trap is a prompt token that makes the
step that computes it go wrong.
"""

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np

from nightmill.errors import ConfigError, ModelError
from nightmill.records import ModelSpec
from nightmill_worker.engine.step import PoolShape, StepOutput, StepPlan
from nightmill_worker.feed.tokenizer import Tokenizer
from nightmill_worker.loaded_model import LoadedModel

ACTIONS = ("exit", "kill", "segv", "raise", "hang", "kill_worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What the engine does, and how fast. Picklable: `build` runs in the engine process."""

    traps: dict[int, str] = field(default_factory=dict)  # token id → one of ACTIONS
    step_s: float = 0.0  # of every step
    token_s: float = 0.0  # of every token of a step, on top
    load_s: float = 0.0
    vocab_size: int = 1000
    num_pages: int = 65536
    page_size: int = 16
    max_model_len: int = 256
    refused_models: tuple[str, ...] = ()  # cannot be loaded
    deaths_dir: Path | None = None  # a file for every sprung trap
    max_deaths: int | None = None  # no trap springs after so many (needs deaths_dir)
    die_every_step: bool = False
    fail_to_build: str | None = None  # how the engine fails to start: model | memory | exit
    journal: Path | None = None  # of every step a line: monotonic seconds at its begin, sequences, those at their first

    @classmethod
    def parse(cls, text: str) -> "Script":
        """From JSON, or from the file that holds it.

        Raises:
            ConfigError: It is no JSON object of these fields.
        """
        try:
            raw = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8"))
            if unknown := set(raw) - {f.name for f in fields(cls)}:
                raise ValueError(f"unknown fields {sorted(unknown)}")
            raw["traps"] = {int(token): str(what) for token, what in raw.get("traps", {}).items()}
            raw["refused_models"] = tuple(raw.get("refused_models", ()))
            for name in ("deaths_dir", "journal"):
                if raw.get(name):
                    raw[name] = Path(raw[name])
            if wrong := set(raw["traps"].values()) - set(ACTIONS):
                raise ValueError(f"unknown actions {sorted(wrong)}")
            return cls(**raw)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"--fake-engine: {error}") from error

    def build(self) -> "ScriptedRunner":
        """Make the runner, or fail as told."""
        match self.fail_to_build:
            case "model":
                raise ModelError("no such model here", hint="give another --model")
            case "memory":
                raise MemoryError("cannot allocate 64 GiB for the page pool")
            case "exit":
                os._exit(7)
        time.sleep(self.load_s)
        return ScriptedRunner(self)


class ScriptedRunner:
    """A Runner; see the module."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._traps = np.array(sorted(script.traps), dtype=np.int64)
        self.pool = PoolShape(num_pages=script.num_pages, page_size=script.page_size, bytes_per_token=64)
        self.vocab_size = script.vocab_size
        self.max_model_len = script.max_model_len
        self._journal = script.journal.open("a", buffering=1) if script.journal is not None else None

    def run(self, plan: StepPlan) -> StepOutput:
        """See Runner."""
        if self._journal is not None:
            fresh = int((plan.context_lens == np.diff(plan.query_starts)).sum())
            self._journal.write(f"{time.monotonic():.6f} {plan.num_sequences} {fresh}\n")
        wait_s = self._script.step_s + self._script.token_s * plan.num_tokens
        if wait_s:
            time.sleep(wait_s)
        if len(self._traps):
            for token in plan.token_ids[np.isin(plan.token_ids, self._traps)][:1]:
                self._spring(self._script.traps[int(token)])
        if self._script.die_every_step:
            self._spring("exit")
        last = plan.token_ids[plan.sample.token_index].astype(np.int64)
        return StepOutput(tokens=(2 + (last * 31 + plan.sample.position * 7) % 97).astype(np.int32))

    def close(self) -> None:
        """See Runner."""
        if self._journal is not None:
            self._journal.close()

    def _spring(self, action: str) -> None:
        deaths = self._script.deaths_dir
        if deaths is not None:
            if self._script.max_deaths is not None and len(list(deaths.iterdir())) >= self._script.max_deaths:
                return
            (deaths / f"{time.monotonic_ns()}-{os.getpid()}").touch()
        match action:
            case "exit":
                os._exit(3)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "segv":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "kill_worker":
                os.kill(os.getppid(), signal.SIGKILL)
            case "hang":
                time.sleep(3600)
        raise RuntimeError("CUDA out of memory: tried to allocate 2 GiB")


def scripted_model(script: Script, cache: Path) -> Callable[[ModelSpec], LoadedModel]:
    """A loader of models that gives the same engine whatever the name.

    Args:
        script: Of the engine.
        cache: Folder for the tokenizer's files.
    """
    directory = _write_tokenizer(cache / f"fake-tokenizer-{script.vocab_size}", script.vocab_size)
    tokenizer = Tokenizer.load(directory)

    def load(spec: ModelSpec) -> LoadedModel:
        if spec.model in script.refused_models:
            raise ModelError(f"{spec.model}: no such model, says the script")
        return LoadedModel(name=spec.model, digest=None, directory=directory, tokenizer=tokenizer, runner_config=script)

    return load


def _write_tokenizer(directory: Path, vocab_size: int) -> Path:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    directory.mkdir(parents=True, exist_ok=True)
    backend = Backend(models.WordLevel({str(i): i for i in range(vocab_size)}, unk_token="1"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    files = {"tokenizer.json": backend.to_str(), "tokenizer_config.json": "{}", "config.json": "{}"}
    for name, text in files.items():  # several workers may do this at once: each file appears whole
        draft = directory / f".{name}.{os.getpid()}"
        draft.write_text(text)
        draft.replace(directory / name)
    return directory
