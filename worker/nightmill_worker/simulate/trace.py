"""A trace: which requests come, with how long prompts and answers."""

import csv
import gzip
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from nightmill.errors import ValidationError
from nightmill.states import Tier

REQUIRED = ("ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One request of a trace."""

    context_tokens: int
    generated_tokens: int  # what the model would say, if nothing cut it off
    prefix_id: str | None = None  # rows with the same id begin alike
    prefix_tokens: int = 0  # leading tokens shared with the rows of the same prefix_id, ≤ context_tokens
    max_tokens: int | None = None
    tier: Tier = Tier.NORMAL
    arrival_s: float = 0.0
    job_id: str = "trace"


@dataclass(frozen=True, slots=True)
class Trace:
    """Rows in file order."""

    rows: tuple[TraceRow, ...]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def has_prefixes(self) -> bool:
        """Some rows share a prefix."""
        return any(row.prefix_tokens for row in self.rows)

    @classmethod
    def of_lengths(cls, lengths: Iterable[tuple[int, int]]) -> "Trace":
        """From pairs of (context tokens, generated tokens)."""
        return cls(tuple(TraceRow(context_tokens=context, generated_tokens=out) for context, out in lengths))


def read_trace(path: Path) -> Trace:
    """Read a CSV (also gzipped) with `ContextTokens,GeneratedTokens` and the optional columns.

    Optional: `PrefixId,PrefixTokens,MaxTokens,Tier,ArrivalSeconds,Job`; others are ignored. An empty field is as if the
    column were missing. Only the order of rows counts where there is no ArrivalSeconds.

    Raises:
        ValidationError: a column is missing, a value is wrong, or there are no rows; it names file and line.
    """
    try:
        with _open(path) as file:
            return Trace(tuple(_rows(path, file)))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValidationError(f"cannot read the trace {path}: {error}") from error


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _rows(path: Path, file: TextIO) -> Iterator[TraceRow]:
    reader = csv.DictReader(file)
    missing = [name for name in REQUIRED if name not in (reader.fieldnames or ())]
    if missing:
        raise ValidationError(
            f"the trace {path} has no column {' and no column '.join(missing)}",
            hint=f"It needs {', '.join(REQUIRED)}; its first line is {','.join(reader.fieldnames or ()) or 'empty'}",
        )
    is_empty = True
    for fields in reader:
        is_empty = False
        yield _Line(path, reader.line_num, fields).row()
    if is_empty:
        raise ValidationError(f"the trace {path} has no rows")


@dataclass(frozen=True, slots=True)
class _Line:
    path: Path
    number: int
    fields: Mapping[str, str | None]

    def row(self) -> TraceRow:
        context = self.whole("ContextTokens", low=1)
        prefix_id = self.text("PrefixId")
        prefix_tokens = self.whole("PrefixTokens", low=0, default=0)
        if prefix_tokens and prefix_id is None:
            raise self.error("PrefixTokens", "given without a PrefixId")
        return TraceRow(
            context_tokens=context,
            generated_tokens=self.whole("GeneratedTokens", low=1),
            prefix_id=prefix_id,
            prefix_tokens=min(prefix_tokens, context),
            max_tokens=self.whole("MaxTokens", low=1, default=0) or None,
            tier=self.tier(),
            arrival_s=self.seconds("ArrivalSeconds"),
            job_id=self.text("Job") or "trace",
        )

    def text(self, name: str) -> str | None:
        return (self.fields.get(name) or "").strip() or None

    def whole(self, name: str, *, low: int, default: int | None = None) -> int:
        text = self.text(name)
        if text is None and default is not None:
            return default
        try:
            value = float(text or "")
        except ValueError:
            raise self.error(name, f"{text!r} is not a number") from None
        if not (math.isfinite(value) and value.is_integer() and value >= low):
            raise self.error(name, f"must be a whole number of at least {low}, not {text}")
        return int(value)

    def seconds(self, name: str) -> float:
        text = self.text(name) or "0"
        try:
            value = float(text)
        except ValueError:
            raise self.error(name, f"{text!r} is not a number of seconds") from None
        if not (math.isfinite(value) and value >= 0):
            raise self.error(name, f"must be seconds from the start, not {text}")
        return value

    def tier(self) -> Tier:
        text = self.text("Tier") or Tier.NORMAL.value
        try:
            return Tier(text.lower())
        except ValueError:
            raise self.error("Tier", f"must be one of {', '.join(Tier)}, not {text!r}") from None

    def error(self, name: str, what: str) -> ValidationError:
        return ValidationError(f"{self.path}, line {self.number}, column {name}: {what}")


def best_saved_tokens(rows: Sequence[TraceRow], page_size: int) -> int:
    """Prefill tokens that a perfect prefix cache saves: full pages only, and never a prompt's last token."""
    hits: dict[str, list[int]] = {}
    for row in rows:
        if row.prefix_id is not None:
            # What is shared is given from the cache at most up to the page before the last token.
            shared = min(row.prefix_tokens, row.context_tokens - 1)
            hits.setdefault(row.prefix_id, []).append(shared // page_size)
    return page_size * sum(sum(pages) - max(pages) for pages in hits.values())
