"""Loading the model that a worker serves: what is the model's fault, and what is not."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from tests.unit.run.dying_load import DyingLoad
from tests.unit.run.test_supervisor import request

from nightmill.errors import ModelError
from nightmill.records import EngineOptions, ModelSpec
from nightmill_worker import engine_session
from nightmill_worker.engine.request import Finished
from nightmill_worker.engine_session import RunOptions
from nightmill_worker.loaded_model import LoadedModel
from nightmill_worker.model_host import FIRST_REFUSAL_S, ModelHost
from nightmill_worker.scripted_engine import Script, scripted_model
from nightmill_worker.service import EngineDiedError

SPEC = ModelSpec(model="any")
LOAD_TRIES = len(engine_session.LOAD_PAUSES_S) + 1


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_session, "LOAD_PAUSES_S", (0.0,) * (LOAD_TRIES - 1))


def _host(tmp_path: Path, times: int) -> ModelHost:
    graves = tmp_path / "graves"
    graves.mkdir()
    load = scripted_model(Script(), tmp_path / "cache")

    def dying(spec: ModelSpec) -> LoadedModel:
        return replace(load(spec), runner_config=DyingLoad(graves=graves, times=times))

    return ModelHost(dying, RunOptions(engine=EngineOptions()), only=None, make_crew=Mock(), make_contexts=Mock())


def test_an_engine_that_is_killed_while_it_loads_is_no_verdict_on_the_model(tmp_path: Path) -> None:
    host = _host(tmp_path, times=LOAD_TRIES - 1)
    host.want(SPEC)
    host.switch()
    try:
        assert host.serving is not None
        assert not host.refuses(SPEC)
    finally:
        host.close()


def test_one_that_is_killed_each_time_is(tmp_path: Path) -> None:
    host = _host(tmp_path, times=LOAD_TRIES)
    host.want(SPEC)
    with pytest.raises(EngineDiedError, match="SIGKILL"):
        host.switch()
    assert host.refuses(SPEC)
    assert host.wanted is None
    host.close()


def test_one_that_is_killed_while_another_takes_its_place_is_loaded_once_more(tmp_path: Path) -> None:
    """Whoever kills an engine for its memory may do so again before the memory is there."""
    host = _host(tmp_path, times=LOAD_TRIES - 1)
    graves = [tmp_path / "graves" / name for name in ("one", "other")]
    for grave in graves:
        grave.touch()  # the first engine lives
    host.want(SPEC)
    host.switch()
    for grave in graves:
        grave.unlink()
    serving = host.serving
    assert serving is not None
    supervisor = serving.session.supervisor
    first = supervisor.service.info.pid
    try:
        with supervisor.open() as mailbox:
            os.kill(first, signal.SIGKILL)
            mailbox.offer([request(1)])
            assert [type(outcome) for outcome in mailbox.collect(60, or_room=False)] == [Finished]
        assert len(list((tmp_path / "graves").iterdir())) == LOAD_TRIES - 1
    finally:
        host.close()


def test_a_model_that_is_not_there_is_tried_again_later_and_later(monkeypatch: pytest.MonkeyPatch) -> None:
    moment = [1000.0]
    monkeypatch.setattr("nightmill_worker.model_host.time.monotonic", lambda: moment[0])
    load = Mock(side_effect=ModelError("no such model"))
    host = ModelHost(load, RunOptions(engine=EngineOptions()), only=None, make_crew=Mock(), make_contexts=Mock())
    for pause_s in (FIRST_REFUSAL_S, 2 * FIRST_REFUSAL_S):
        host.want(SPEC)
        with pytest.raises(ModelError, match="no such model"):
            host.switch()
        host.want(SPEC)
        assert host.wanted is None, "not again at once"
        moment[0] += pause_s - 1
        assert host.refuses(SPEC)
        moment[0] += 1
        assert not host.refuses(SPEC)
    assert load.call_count == 2
    host.close()
