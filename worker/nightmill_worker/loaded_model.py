"""From `--model` to what a run needs before an engine exists. Imports no torch."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nightmill.records import EngineOptions, ModelSpec
from nightmill_worker.cores import CorePlan, claim_cores, find_cores, plan_cores
from nightmill_worker.feed.tokenizer import Tokenizer
from nightmill_worker.model.device_choice import CUDA, resolve_limits
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
    cores: CorePlan | None = None  # None: no cores of this machine are computed on


def load_model(
    spec: ModelSpec, engine: EngineOptions, *, progress: Callable[[str], None], pins: bool = False
) -> LoadedModel:
    """Find or fetch the model and load its tokenizer; the weights wait for the engine process.

    Args:
        spec: Which model.
        engine: How it will be run.
        progress: Told what is being done.
        pins: The engine will be a process of its own, whose threads may be kept on their cores.

    Raises:
        ModelError: There is no such model, or a file of it is missing or damaged.
    """
    progress(f"looking for {spec.model}")
    resolved = resolve_model(spec, progress=progress)
    on_gpu = resolve_limits(engine).device == CUDA
    found = find_cores()
    cores = plan_cores(found, num_threads=engine.num_threads, on_gpu=on_gpu)
    if pins and not on_gpu:
        cores = claim_cores(cores, found)
    return LoadedModel(
        name=resolved.name,
        digest=resolved.digest,
        directory=resolved.directory,
        tokenizer=Tokenizer.load(resolved.directory),
        runner_config=ModelRecipe(directory=resolved.directory, spec=spec, options=engine, cores=cores),
        cores=cores,
    )
