"""Fixtures that every kind of test may use."""

import os
from importlib.util import find_spec
from pathlib import Path

# Read once, when triton is imported, by whoever imports it first: its kernels run on CPU tensors here.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from hypothesis import settings

from nightmill.records import ModelSpec
from nightmill_worker.model.source import resolve_model
from nightmill_worker.model.threads import limit_spinning

# A machine with a GPU has torch and pytest, and nothing to start a broker with: the kernels' tests run there, too.
pytest_plugins = ["tests.services.plugin"] if find_spec("amqp") else []

# Before a test loads torch: threads that spin take the cores from the processes that the tests start.
limit_spinning()

# On a busy machine one example takes as long as it takes: time is measured by benchmarks, not by tests.
settings.register_profile("nightmill", deadline=None)
settings.load_profile("nightmill")


@pytest.fixture(scope="session")
def demo_model_dir() -> Path:
    """The demo model in the user's cache; fetched and converted the first time. Mark its tests `demo_model`."""
    return resolve_model(ModelSpec(model="demo")).directory
