"""Fixtures of the output tests."""

import os

import pytest


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Property tests write thousands of files, and no test here pulls the plug."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
