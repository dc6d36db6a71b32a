"""How long prompts are, for `nightmill validate`: in tokens where the worker's packages are, else in characters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from nightmill.cli.show import show_note
from nightmill.records import JobSpec
from nightmill.rows import InputRow
from nightmill.validate import CountTokens, TokenLengths

GROUP = "nightmill.token_counter"
BAR_WIDTH = 40


@dataclass(frozen=True, slots=True)
class Ruler:
    """What lengths are measured with."""

    unit: str  # tokens | characters
    count: CountTokens


def choose_ruler(spec: JobSpec, model: str | None) -> Ruler:
    """The tokenizer of the model; characters when there is no model or nothing that can load one, which is told.

    Raises:
        ModelError: there is no such model.
    """
    if model is None:
        return Ruler("characters", count_characters)
    from importlib.metadata import entry_points

    for point in entry_points(group=GROUP):
        try:
            load = point.load()
        except ModuleNotFoundError as error:
            if (error.name or "nightmill").startswith("nightmill."):
                raise
            continue
        return Ruler("tokens", load(spec))
    show_note("tokens can be counted only where the worker is (pip install 'nightmill[worker]'): these are characters")
    return Ruler("characters", count_characters)


def count_characters(rows: Sequence[InputRow]) -> list[int]:
    """Of the prompt, or of the texts of all messages; without what a chat template would add."""
    return [len(row.prompt) if row.prompt is not None else _characters(row.messages or ()) for row in rows]


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_characters(part) for name, part in value.items() if name in ("content", "text"))
    if isinstance(value, Sequence):
        return sum(_characters(part) for part in value)
    return 0


def show_lengths(unit: str, lengths: TokenLengths) -> None:
    """A line of figures, then the histogram; 80 columns."""
    click.echo(
        f"\nPrompt lengths in {unit}: {lengths.minimum:,} to {lengths.maximum:,}, median {lengths.median:,}, "
        f"95 % up to {lengths.p95:,}, {lengths.total:,} in all"
    )
    most = max(rows for _, rows in lengths.histogram)
    bounds = [f"{bound:,}" for bound, _ in lengths.histogram]
    counts = [f"{rows:,}" for _, rows in lengths.histogram]
    for bound, count, (_, rows) in zip(bounds, counts, lengths.histogram, strict=True):
        bar = "█" * max(1, round(BAR_WIDTH * rows / most))
        click.echo(f"  up to {bound.rjust(max(map(len, bounds)))}  {count.rjust(max(map(len, counts)))} rows  {bar}")
