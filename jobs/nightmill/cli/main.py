"""`nightmill`: the command group. A command's module is imported when that command is asked for, and not before."""

import importlib
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nightmill import __version__
from nightmill.cli.show import show_error, show_note
from nightmill.errors import ExitCode, NightmillError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

COMMANDS = {
    "submit": "nightmill.cli.submit:submit",
    "status": "nightmill.cli.status:status",
    "list": "nightmill.cli.jobs:list_jobs",
    "watch": "nightmill.cli.watch:watch",
    "wait": "nightmill.cli.wait:wait",
    "errors": "nightmill.cli.row_errors:row_errors",
    "results": "nightmill.cli.results:results",
    "validate": "nightmill.cli.validate:validate",
    "cancel": "nightmill.cli.cancel:cancel",
    "retry": "nightmill.cli.retry:retry",
    "doctor": "nightmill.cli.doctor:doctor",
    "migrate": "nightmill.cli.migrate:migrate",
    "janitor": "nightmill.cli.janitor:janitor",
}
# Help lists the commands of the entry-point group without importing them: theirs are the heavy packages.
WORKER_HELP = {
    "run": "Answer every row of a Parquet input, in this process.",
    "worker": "Work on the jobs of a fleet, until told to stop.",
    "bench": "Measure the engine on this machine.",
    "simulate": "What a file would take on a device: the real scheduler on a roofline.",
}
PLUGIN_GROUP = "nightmill.commands"


class NightmillGroup(click.Group):
    """Finds commands lazily; turns a NightmillError into a message and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The worker's commands first: `run` is what most people came for."""
        plugins = sorted(point.name for point in _plugins() if point.name not in COMMANDS)
        return [*sorted(plugins, key=lambda name: name != "run"), *COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command."""
        if cmd_name in COMMANDS:
            module, _, attribute = COMMANDS[cmd_name].partition(":")
            return _command(getattr(importlib.import_module(module), attribute))
        for point in _plugins():
            if point.name == cmd_name:
                return _load(point)
        return None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """One line for each command."""
        rows = [(name, self._short_help(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def _short_help(self, ctx: click.Context, name: str) -> str:
        if name in WORKER_HELP:
            return WORKER_HELP[name]
        command = self.get_command(ctx, name)
        return command.get_short_help_str(limit=90) if command is not None else ""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; every expected failure ends here, as words and a code."""
        try:
            result = super().invoke(ctx)
        except NightmillError as error:
            show_error(error)
            ctx.exit(error.exit_code)
        except BrokenPipeError:  # `nightmill errors … | head`
            sys.stderr.close()
            ctx.exit(ExitCode.DONE)
        except (click.exceptions.Exit, click.ClickException, click.Abort):
            raise
        except KeyboardInterrupt:
            show_note("interrupted")
            ctx.exit(ExitCode.INTERRUPTED)
        except ModuleNotFoundError as error:
            show_error(
                _bug(error)
                if (error.name or "nightmill").startswith("nightmill")
                else _missing(ctx.invoked_subcommand, error)
            )
            ctx.exit(ExitCode.FAILED)
        except OSError as error:
            show_error(NightmillError(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"))
            ctx.exit(ExitCode.FAILED)
        except Exception as error:  # noqa: BLE001 - the user gets words; who wants the stack asks for it
            show_error(_bug(error))
            ctx.exit(ExitCode.FAILED)
        if isinstance(result, int):
            ctx.exit(result)
        return result


def _missing(command: str | None, error: ModuleNotFoundError) -> NightmillError:
    return NightmillError(
        f"`nightmill {command}` needs packages that are not installed: {error}",
        hint="pip install 'nightmill[worker]' installs them.",
    )


def _bug(error: Exception) -> NightmillError:
    if os.environ.get("NIGHTMILL_LOG_LEVEL", "").lower() == "debug":
        traceback.print_exception(error)
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if "nightmill" in frame.filename]
    place = f", in {Path(ours[-1].filename).name} line {ours[-1].lineno}" if ours else ""
    return NightmillError(
        f"this is a bug in nightmill: {type(error).__name__}: {error}{place}",
        hint="Finished rows are kept. NIGHTMILL_LOG_LEVEL=debug shows the stack: please report it.",
    )


def _plugins() -> "list[EntryPoint]":
    from importlib.metadata import entry_points  # 40 ms that `status` does not need

    return list(entry_points(group=PLUGIN_GROUP))


def _load(point: "EntryPoint") -> click.Command:
    try:
        return _command(point.load())
    except ModuleNotFoundError as error:
        raise _missing(point.name, error) from error


def open_standard_streams() -> None:
    """Point descriptors 0 to 2 that are closed at nothing: the next file opened would get what is written there."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            # Takes the lowest number that is free; the engine process needs it, too.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _command(value: object) -> click.Command:
    if not isinstance(value, click.Command):
        raise TypeError(f"{value!r} is not a click command")
    return value


@click.group(
    cls=NightmillGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Exit codes: 0 done, 1 failed, 2 usage, 3 validation, 4 not found, 5 rows failed, 6 cancelled or expired, "
    "124 wait timed out.",
)
@click.version_option(__version__, prog_name="nightmill")
def cli() -> None:
    """Parquet prompts in, Parquet completions out.

    \b
    nightmill run prompts/ -o answers/ --model demo    every row gets a completion or an error code
    nightmill status                                   how far the last job is
    """


def main() -> None:
    """Entry point of the console script."""
    open_standard_streams()
    try:
        cli(prog_name="nightmill")
    except NightmillError as error:  # from loading a command, before `invoke`
        show_error(error)
        sys.exit(error.exit_code)
