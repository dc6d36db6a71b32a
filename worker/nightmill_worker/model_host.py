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
from nightmill_worker.shard_crew import ShardCrew

log = logging.getLogger(__name__)

FIRST_REFUSAL_S, MAX_REFUSAL_S = 15.0, 300.0  # until a model that could not be loaded is tried again: doubling
LoadModel = Callable[[ModelSpec], LoadedModel]


@dataclass(frozen=True, slots=True, eq=False)
class Serving:
    """What shards run on now."""

    spec: ModelSpec
    session: EngineSession
    crew: ShardCrew
    contexts: JobContexts


@dataclass(frozen=True, slots=True)
class _Refusal:
    pause_s: float
    until: float

    @classmethod
    def after(cls, last: "_Refusal | None") -> "_Refusal":
        pause_s = FIRST_REFUSAL_S if last is None else min(2 * last.pause_s, MAX_REFUSAL_S)
        return cls(pause_s, time.monotonic() + pause_s)


class ModelHost:
    """Loads, switches, forgets. A model that cannot be loaded is left alone for a while, longer each time."""

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
        self._refused: dict[ModelSpec, _Refusal] = {}
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

    def refuses(self, spec: ModelSpec) -> bool:
        """Whether it could not be loaded a while ago, and is not tried again yet."""
        refusal = self._refused.get(spec)
        return refusal is not None and time.monotonic() < refusal.until

    def want(self, spec: ModelSpec) -> None:
        """Ask the main thread for a model; the first to ask is heard."""
        with self._changed:
            if self._wanted is None and not self.refuses(spec):
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
                if self._closed or self.refuses(spec):
                    return None
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    return None

    def switch(self) -> None:
        """Load what is wanted. Main thread, with no shard at work.

        Raises:
            NightmillError: It cannot be loaded; that is remembered for a while, and nothing is served.
        """
        spec = self._wanted
        assert spec is not None
        self._drop()
        try:
            session = self._open_session(spec)
        except NightmillError:
            with self._changed:
                self._refused[spec] = _Refusal.after(self._refused.get(spec))
                self._wanted = None
                self._changed.notify_all()
            raise
        info = session.supervisor.service.info
        for note in (engine_line(session.model.name, info), *info.notes):
            log.info("%s", note)
        if session.model.cores is not None:
            log.info("%s", session.model.cores)
        with self._changed:
            self._refused.pop(spec, None)
            self._serving = Serving(spec, session, self._make_crew(session), self._make_contexts(session))
            self._wanted = None
            self._changed.notify_all()

    def close(self) -> None:
        """End the engine; whoever waits gets nothing."""
        with self._changed:
            self._closed = True
        self._drop()

    def _open_session(self, spec: ModelSpec) -> EngineSession:
        model = self._load(spec)
        log.info("loading %s", model.name)
        return EngineSession(model, self._options)

    def _drop(self) -> None:
        with self._changed:
            serving, self._serving = self._serving, None
            self._changed.notify_all()
        if serving is not None:
            serving.session.close()
