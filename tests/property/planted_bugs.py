"""Is a state machine able to fail? Plants a bug, and hunts for it in an interpreter of its own."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

Plant = Callable[[pytest.MonkeyPatch], None]


def hunt(machine: type[RuleBasedStateMachine], plants: Sequence[Plant], name: str) -> None:
    """Run the machine with a bug in place; its error when it is found."""
    next(plant for plant in plants if plant.__name__ == name)(pytest.MonkeyPatch())
    rules = settings(
        max_examples=4000,
        stateful_step_count=30,
        phases=[Phase.generate],
        print_blob=False,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=rules)


def hunt_alone(module: str, name: str) -> subprocess.CompletedProcess[str]:
    """Call the module's `hunt(name)`: what hypothesis draws depends on the modules that other tests have loaded."""
    program = f"from tests.property.{module} import hunt; hunt({name!r})"
    return subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
