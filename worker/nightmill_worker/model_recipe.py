"""The model's runner as a recipe that the feeder can hold without importing torch."""

from dataclasses import dataclass, replace
from pathlib import Path

from nightmill.records import EngineOptions, ModelSpec
from nightmill_worker.cores import CorePlan, find_cores, plan_cores
from nightmill_worker.engine.step import Runner


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecipe:
    """A RunnerConfig: it is built in the engine process, where torch is."""

    directory: Path  # config.json, and safetensors unless load_format is dummy
    spec: ModelSpec
    options: EngineOptions
    cores: CorePlan | None = None  # None: planned where it is built

    def build(self) -> Runner:
        """Load the weights and allocate the pool.

        Raises:
            ModelError: The model is not supported, not readable, or does not fit.
        """
        from nightmill_worker.model.instruction_set import limit_instruction_set
        from nightmill_worker.model.threads import limit_spinning

        # Before torch is there: where OMP_PROC_BIND is set, loading it takes all cores but one from this thread's mask.
        plan = self.cores or plan_cores(find_cores(), num_threads=self.options.num_threads)
        plan.pin()
        limit_spinning()
        limit_instruction_set()
        from nightmill_worker.model.runner import ModelRunnerConfig

        options = replace(self.options, num_threads=plan.engine_threads)
        return ModelRunnerConfig(model_dir=self.directory, spec=self.spec, options=options).build()
