"""An engine that loads while its job is being planned."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from nightmill.records import EngineOptions
from nightmill_worker.engine_session import EngineSession
from nightmill_worker.engine_start import EarlyEngine, RunOptions
from nightmill_worker.loaded_model import LoadedModel
from nightmill_worker.scripted_engine import Script

OPTIONS = RunOptions(engine=EngineOptions(max_num_seqs=8, device="cpu"))


@pytest.fixture
def model() -> LoadedModel:
    tokenizer: Any = None
    return LoadedModel(
        name="scripted", digest=None, directory=Path("nowhere"), tokenizer=tokenizer, runner_config=Script()
    )


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No engine outlives its test."""
    before = set(psutil.Process().children(recursive=True))
    yield
    left = [child for child in psutil.Process().children(recursive=True) if child not in before]
    assert not [child for child in left if "spawn_main" in " ".join(child.cmdline())]


def test_a_session_takes_the_engine_that_has_begun(model):
    with EarlyEngine(model, OPTIONS) as early:
        begun = early._service
        session = EngineSession(model, OPTIONS, early)
        assert session.supervisor.service is begun
        assert early.take() is None
    assert psutil.pid_exists(session.supervisor.service.info.pid)  # whoever took it closes it
    session.close()


def test_an_engine_that_nobody_takes_is_ended(model):
    with EarlyEngine(model, OPTIONS):
        pass


def test_a_session_without_one_starts_its_own(model):
    session = EngineSession(model, OPTIONS)
    assert session.supervisor.service.info.pid != os.getpid()
    session.close()
