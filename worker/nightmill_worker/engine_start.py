"""Starting a model's engine, now or ahead of its need. Imports neither the store nor Arrow: it comes before them."""

from dataclasses import dataclass

from nightmill.records import EngineOptions
from nightmill_worker.engine.options import LoopOptions
from nightmill_worker.loaded_model import LoadedModel
from nightmill_worker.model.device_choice import CUDA, resolve_limits
from nightmill_worker.service import DEFAULT_STEP_TIMEOUT_S, EngineService

NO_LIMIT = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How this process runs jobs; nothing in here changes an answer."""

    engine: EngineOptions
    in_process: bool = False
    step_timeout_s: float = DEFAULT_STEP_TIMEOUT_S


def begin_engine(model: LoadedModel, options: RunOptions) -> EngineService:
    """An engine that has begun to load the model; `wait_ready` before it is used."""
    engine, limits = options.engine, resolve_limits(options.engine)
    return EngineService.begin(
        model.runner_config,
        LoopOptions(
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            enable_prefix_caching=engine.enable_prefix_caching,
            enable_shared_attention=engine.enable_shared_attention,
            tier_shares=engine.tier_shares,
            async_scheduling=limits.device == CUDA if engine.async_scheduling is None else engine.async_scheduling,
            # The runner knows its model's, and the smaller one counts.
            max_model_len=NO_LIMIT,
        ),
        in_process=options.in_process,
        tokenizer_dir=model.directory,
        step_timeout_s=options.step_timeout_s,
    )


class EarlyEngine:
    """An engine that loads while its job is still being planned: some seconds of what a short job takes.

    As a context it ends an engine that nobody has taken: the job was refused, or had ended before.
    """

    def __init__(self, model: LoadedModel, options: RunOptions) -> None:
        self._service: EngineService | None = begin_engine(model, options)

    def take(self) -> EngineService | None:
        """The engine, once: whoever takes it waits for it and closes it. None: it was taken before."""
        service, self._service = self._service, None
        return service

    def __enter__(self) -> "EarlyEngine":
        return self

    def __exit__(self, *_: object) -> None:
        service = self.take()
        if service is not None:
            service.close(timeout_s=0)
