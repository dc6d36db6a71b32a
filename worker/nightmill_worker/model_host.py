"""The one model that a worker serves at a time, with its engine: loaded by the main thread, used by all."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from nightmill.errors import NightmillError
from nightmill.records import ModelSpec
from nightmill_worker.engine_session import EngineSession, RunOptions, engine_line
from nightmill_worker.fleet_jobs import JobContexts
from nightmill_worker.loaded_model import LoadedModel
from nightmill_worker.service import DeathCause, EngineDiedError
from nightmill_worker.shard_crew import ShardCrew

log = logging.getLogger(__name__)

LOAD_TRIES = 3
LoadModel = Callable[[ModelSpec], LoadedModel]


@dataclass(frozen=True, slots=True, eq=False)
class Serving:
    """What shards run on now."""

    spec: ModelSpec
    session: EngineSession
    crew: ShardCrew
    contexts: JobContexts


class ModelHost:
    """Loads, switches, forgets. A model that cannot be loaded is not tried again in this process."""

    def __init__(
        self,
        load: LoadModel,
        options: RunOptions,
        *,
        only: str | None,
        make_crew: Callable[[EngineSession], ShardCrew],
        make_contexts: Callable[[EngineSession], JobContexts],
    ) -> None:
        self._load = load
        self._options = options
        self._only = only
        self._make_crew = make_crew
        self._make_contexts = make_contexts
        self._changed = threading.Condition()
        self._serving: Serving | None = None
        self._wanted: ModelSpec | None = None if only is None else ModelSpec(model=only)
        self._refused: dict[ModelSpec, NightmillError] = {}
        self._closed = False

    @property
    def serving(self) -> Serving | None:
        """The loaded model; None before the first."""
        return self._serving

    def accepts(self, spec: ModelSpec) -> bool:
        """Whether this worker may ever serve it."""
        return self._only is None or spec.model == self._only

    @property
    def serves_one(self) -> bool:
        """Whether it was told which model to serve."""
        return self._only is not None

    def refusal(self, spec: ModelSpec) -> NightmillError | None:
        """Why it could not be loaded; None when it could, or was not tried."""
        return self._refused.get(spec)

    def want(self, spec: ModelSpec) -> None:
        """Ask the main thread for a model; the first to ask is heard."""
        with self._changed:
            if self._wanted is None and spec not in self._refused:
                self._wanted = spec

    @property
    def wanted(self) -> ModelSpec | None:
        """What the main thread should load now; None: nothing."""
        return self._wanted

    def wait(self, spec: ModelSpec, deadline: float) -> Serving | None:
        """What serves this model, waiting until `deadline` (monotonic) while nothing is loaded yet."""
        with self._changed:
            while True:
                serving = self._serving
                if serving is not None:
                    return serving if serving.spec == spec else None
                if self._closed or spec in self._refused:
                    return None
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    return None

    def switch(self) -> None:
        """Load what is wanted. Main thread, with no shard at work.

        Raises:
            NightmillError: It cannot be loaded; it is remembered, and nothing is served.
        """
        spec = self._wanted
        assert spec is not None
        self._drop()
        try:
            session = self._open_session(spec)
        except NightmillError as error:
            with self._changed:
                self._refused[spec] = error
                self._wanted = None
                self._changed.notify_all()
            raise
        log.info("%s", engine_line(session.model.name, session.supervisor.service.info))
        with self._changed:
            self._serving = Serving(spec, session, self._make_crew(session), self._make_contexts(session))
            self._wanted = None
            self._changed.notify_all()

    def close(self) -> None:
        """End the engine; whoever waits gets nothing."""
        with self._changed:
            self._closed = True
        self._drop()

    def _open_session(self, spec: ModelSpec) -> EngineSession:
        """Load it. An engine that is killed meanwhile says nothing about the model: whole jobs would fail for it."""
        model = self._load(spec)
        for tries_left in reversed(range(LOAD_TRIES)):
            log.info("loading %s", model.name)
            try:
                return EngineSession(model, self._options)
            except EngineDiedError as error:
                if error.cause is not DeathCause.SIGNAL or not tries_left:
                    raise
                log.warning("%s is loaded once more: %s", model.name, error)
        raise AssertionError("unreachable")

    def _drop(self) -> None:
        with self._changed:
            serving, self._serving = self._serving, None
            self._changed.notify_all()
        if serving is not None:
            serving.session.close()
