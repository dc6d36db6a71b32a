"""Help in sections: forty flags in one list are not read by anybody."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import click

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

_SECTIONS: dict[int, str] = {}  # id of a parameter → its section


def section(title: str, *options: Decorator) -> Decorator:
    """One decorator of several options, listed together in the help."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
            parameters: list[click.Parameter] = command.__click_params__  # type: ignore[attr-defined]
            _SECTIONS[id(parameters[-1])] = title
        return command

    return decorate


class SectionedCommand(click.Command):
    """A command whose help lists options by section, those without one at the end."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections in the order in which they were given."""
        by_title: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):  # arguments are in the usage line
                by_title[_SECTIONS.get(id(parameter), "Other")].append(record)
        for title in sorted(by_title, key=lambda title: title == "Other"):
            with formatter.section(title):
                formatter.write_dl(by_title[title], col_max=34)
