"""What can be turned off for a comparison, in whatever the engine and the runner offer."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from nightmill.records import EngineOptions
from nightmill_worker.engine.options import LoopOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """One option."""

    without: str  # what is turned off, in words
    off: Mapping[str, Any]  # keyword arguments that turn it off


def _switch(record: type, name: str, without: str) -> Switch | None:
    """None: the record has no such option."""
    return Switch(without=without, off={name: False}) if name in {f.name for f in fields(record)} else None


GRAPHS = _switch(EngineOptions, "enable_graphs", "without CUDA graphs")
RUN_AHEAD = _switch(LoopOptions, "run_ahead", "without steps in flight")
