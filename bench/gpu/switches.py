"""What can be turned off: for a comparison, or for a whole run where it does not work.

Options are looked up by name, so that the script runs on an engine that does not have them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from nightmill.records import EngineOptions
from nightmill_worker.engine.options import LoopOptions


@dataclass(slots=True)
class Switch:
    """One option of an engine or a loop."""

    name: str  # on the command line
    without: str  # what is turned off, in words
    on: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments
    off: Mapping[str, Any] = field(default_factory=dict)
    can_compare: bool = False  # it is there, and may be on

    @property
    def default(self) -> Mapping[str, Any]:
        """As runs are that compare nothing."""
        return self.on if self.can_compare else self.off

    @classmethod
    def of(cls, record: type, option: str, name: str, without: str, *, on: bool) -> "Switch":
        """By the option that turns it on or off, if the record has it."""
        if option not in {f.name for f in fields(record)}:
            return cls(name, without)
        return cls(name, without, {option: on}, {option: not on}, can_compare=True)


GRAPHS = Switch.of(EngineOptions, "enforce_eager", "graphs", "without CUDA graphs", on=False)
RUN_AHEAD = Switch.of(LoopOptions, "async_scheduling", "run-ahead", "one step at a time", on=True)
SWITCHES = (GRAPHS, RUN_AHEAD)


def turn_off(names: Sequence[str]) -> None:
    """In every run of this process.

    Raises:
        ValueError: no switch has this name.
    """
    for name in names:
        found = [switch for switch in SWITCHES if switch.name == name]
        if not found:
            raise ValueError(f"no switch {name}; there are {', '.join(s.name for s in SWITCHES)}")
        found[0].can_compare = False
