"""How commands talk: data on stdout, everything else on stderr."""

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import click

from nightmill.errors import NightmillError


def show_error(error: NightmillError) -> None:
    """What happened and where; then, on its own line, what to do."""
    show_note(f"{click.style('error', fg='red', bold=True)}: {error.message}")
    if error.hint:
        show_note(f"  {error.hint}")


def show_note(text: str) -> None:
    """A line for the person at the terminal."""
    with contextlib.suppress(OSError):  # nobody reads stderr any more (`2>&1 | head`): no reason to stop
        click.echo(text, err=True)


def show_json(value: Mapping[str, Any] | Sequence[Any]) -> None:
    """One JSON value, on one line: `jq` and log collectors both like that."""
    click.echo(json.dumps(value, ensure_ascii=False))


def show_value(value: object) -> None:
    """One bare value on stdout, at once: scripts take it as it is."""
    click.echo(str(value))
    sys.stdout.flush()


def show_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns padded with spaces; numbers to the right. Plain text, so that `awk` can read it."""
    cells = [[_text(value) for value in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(header), *cells]) for i in range(len(header))]
    right = [
        bool(rows) and all(isinstance(row[i], (int, float)) or row[i] is None for row in rows)
        for i in range(len(header))
    ]
    for line in [list(header), *cells]:
        padded = [text.rjust(w) if r else text.ljust(w) for text, w, r in zip(line, widths, right, strict=True)]
        click.echo("  ".join(padded).rstrip())


def show_fields(fields: Mapping[str, object]) -> None:
    """One `name  value` line each; those without a value are left out."""
    shown = {name: value for name, value in fields.items() if value is not None}
    width = max(map(len, shown), default=0)
    for name, value in shown.items():
        click.echo(f"{name.ljust(width)}  {_text(value)}")


def iso(moment: datetime | None) -> str | None:
    """UTC to the second, as in logs."""
    return None if moment is None else moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.1f}"
    return str(value)


json_option = click.option("--json", "as_json", is_flag=True, help="One JSON value on stdout.")
quiet_option = click.option("-q", "--quiet", is_flag=True, help="No talk on stderr but errors.")
