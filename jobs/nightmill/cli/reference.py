"""The reference of the command line, made from the commands: `python -m nightmill.cli.reference > docs/cli.md`."""

import click

from nightmill.cli.main import cli
from nightmill.errors import ExitCode

WIDTH = 110
_INTRO = """\
# Command line

Made by `make docs` from the commands' own help; a test keeps it true.

Data goes to stdout, talk to stderr. `--json` gives one JSON value on stdout (`errors` and `watch`: one a line).
`run`, `worker`, `bench` and `simulate` need `pip install 'nightmill[worker]'`; for the others `pip install nightmill`
is enough.

| exit code | |
|---|---|
"""
_EXIT_CODES = {
    ExitCode.DONE: "done, also with some row errors",
    ExitCode.FAILED: "failed",
    ExitCode.USAGE: "usage: a flag or a setting is no good",
    ExitCode.VALIDATION: "validation: the input, the output or the model does not fit; nothing was submitted",
    ExitCode.NOT_FOUND: "no such job",
    ExitCode.ROWS_FAILED: "every row failed, or more than `--max-failed-rows`",
    ExitCode.CANCELLED: "the job was cancelled, or expired",
    ExitCode.WAIT_TIMED_OUT: "`--timeout` passed before the job had ended; it goes on",
    ExitCode.INTERRUPTED: "Ctrl-C (SIGINT)",
    ExitCode.TERMINATED: "SIGTERM",
}


def reference() -> str:
    """The whole of docs/cli.md, the same on every terminal."""
    context = click.Context(cli, info_name="nightmill", **cli.context_settings)
    names = cli.list_commands(context)
    codes = "".join(f"| {code} | {meaning} |\n" for code, meaning in _EXIT_CODES.items())
    return _INTRO + codes + "".join(_section(name, context) for name in names)


def _section(name: str, parent: click.Context) -> str:
    command = cli.get_command(parent, name)
    assert command is not None
    with click.Context(
        command, info_name=name, parent=parent, terminal_width=WIDTH, max_content_width=WIDTH
    ) as context:
        return f"\n## nightmill {name}\n\n```\n{command.get_help(context).rstrip()}\n```\n"


if __name__ == "__main__":
    click.echo(reference(), nl=False)
