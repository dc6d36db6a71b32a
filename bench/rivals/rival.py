"""What the driver knows of an engine before it runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PipInstall:
    """One `pip install`."""

    arguments: tuple[str, ...]
    requirements_of: str = ""
    """Also everything that this installed distribution asks for, its extras and `without` apart."""
    without: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """An engine, how to install it and how to run it at its best."""

    name: str
    what: str  # for the report's list of engines
    script: str  # in children/
    model: str  # which form of the weights: a key of Materials.models
    other_model: str = ""  # where that form cannot be made
    settings: Mapping[str, Any]
    venv: str = ""  # "": the virtual environment that this process runs in
    installs: tuple[PipInstall, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)  # {cores}, {venv} are filled in
    preload: tuple[str, ...] = ()  # libraries for LD_PRELOAD, those that exist
    rounds: int | None = None
    """At most so many: an engine that takes minutes for a workload is measured less often."""
    rows: Mapping[str, int] = field(default_factory=dict)
    """Of a workload at most so many rows; such a figure is no rival's best, and is marked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One timed run and what the machine did meanwhile."""

    rival: str
    workload: str
    round: int  # from 1
    attempt: int  # from 1; a disturbed run is repeated
    rows: int
    is_whole: bool  # all rows of the workload
    prompt_tokens: int
    output_tokens: int
    seconds: float
    cpu_s: float  # of the engine's processes
    other_cores: float
    steal_cores: float
    is_disturbed: bool
    peak_rss_bytes: int  # so far, loading included
    rows_wrong_length: int
    same_first_token: float | None
    """Share of rows that begin with the token that the first engine's rows begin with: the same model?"""
    detail: dict[str, float]

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second."""
        return self.output_tokens / self.seconds
