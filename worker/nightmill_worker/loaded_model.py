"""From `--model` to what a run needs before an engine exists. Imports no torch."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nightmill.records import EngineOptions, ModelSpec
from nightmill_worker.feed.tokenizer import Tokenizer
from nightmill_worker.model.source import resolve_model
from nightmill_worker.model_recipe import ModelRecipe
from nightmill_worker.wire import RunnerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """What the feeder needs of a model."""

    name: str  # value of the `model` column
    digest: str | None
    directory: Path  # of the tokenizer; the engine reads it for stop strings
    tokenizer: Tokenizer
    runner_config: RunnerConfig


def load_model(spec: ModelSpec, engine: EngineOptions, *, progress: Callable[[str], None]) -> LoadedModel:
    """Find or fetch the model and load its tokenizer; the weights wait for the engine process.

    Raises:
        ModelError: There is no such model, or a file of it is missing or damaged.
    """
    progress(f"looking for {spec.model}")
    resolved = resolve_model(spec, progress=progress)
    return LoadedModel(
        name=resolved.name,
        digest=resolved.digest,
        directory=resolved.directory,
        tokenizer=Tokenizer.load(resolved.directory),
        runner_config=ModelRecipe(directory=resolved.directory, spec=spec, options=engine),
    )
