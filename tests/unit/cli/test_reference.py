"""docs/cli.md says what the commands say."""

from pathlib import Path

import click
import pytest

from nightmill.cli.main import COMMANDS, WORKER_HELP, cli
from nightmill.cli.reference import reference

ROOT = Path(__file__).parents[3]
NAMES = cli.list_commands(click.Context(cli))


def test_the_reference_is_up_to_date() -> None:
    written = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    # Words, not lines: another version of click may fold them elsewhere.
    assert written.split() == reference().split(), "run `make docs`"


def test_the_reference_does_not_depend_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    narrow = reference()
    monkeypatch.setenv("COLUMNS", "300")
    assert reference() == narrow


def test_every_command_is_known_with_a_line() -> None:
    assert set(NAMES) == set(COMMANDS) | set(WORKER_HELP)


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_an_example_and_explains_its_options(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    assert command.help
    assert f"nightmill {name}" in (command.epilog or ""), "no example"
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            assert parameter.help or parameter.show_default, parameter.name
