"""Fixtures that every kind of test may use."""

from pathlib import Path

import pytest

from nightmill.records import ModelSpec
from nightmill_worker.model.source import resolve_model


@pytest.fixture(scope="session")
def demo_model_dir() -> Path:
    """The demo model in the user's cache; fetched and converted the first time. Mark its tests `demo_model`."""
    return resolve_model(ModelSpec(model="demo")).directory
