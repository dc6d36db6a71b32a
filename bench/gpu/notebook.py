"""What a section finds, on disk after every entry: a section that is killed has lost nothing that it had found."""

import json
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured or computed number."""

    name: str
    value: float
    unit: str
    note: str = ""
    is_headline: bool = False  # shown in the table that is printed last


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Something that had to hold."""

    name: str
    passed: bool
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Figures side by side, for RESULTS.md."""

    title: str
    columns: list[str]
    rows: list[list[str]]


@dataclass(slots=True)
class Findings:
    """All of one section."""

    figures: list[Figure] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        """As `from_json` reads it."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Findings":
        """What `to_json` wrote."""
        plain = json.loads(text)
        return cls(
            [Figure(**f) for f in plain["figures"]],
            [Check(**c) for c in plain["checks"]],
            [Table(**t) for t in plain["tables"]],
            plain["notes"],
        )


class Notebook:
    """A section writes here; the file is whole at any moment."""

    def __init__(self, path: Path, *, seconds: float, folder: Path) -> None:
        self._path = path
        self._folder = folder
        self._ends_at = time.monotonic() + seconds
        self.findings = Findings()
        self._save()

    @property
    def seconds_left(self) -> float:
        """Until this section is killed."""
        return self._ends_at - time.monotonic()

    def has_time_for(self, what: str, seconds: float) -> bool:
        """Whether `seconds` are left; if not, a note says that `what` was left out."""
        if self.seconds_left >= seconds:
            return True
        self.note(f"left out for want of time: {what}")
        return False

    def figure(self, name: str, value: float, unit: str, note: str = "", *, headline: bool = False) -> None:
        """Record a number and print it."""
        self.findings.figures.append(Figure(name=name, value=value, unit=unit, note=note, is_headline=headline))
        self.say(f"{name}: {number(value)} {unit}{f' ({note})' if note else ''}")
        self._save()

    def check(self, name: str, passed: bool, detail: str = "") -> bool:
        """Record whether something held, and pass it through."""
        self.findings.checks.append(Check(name=name, passed=bool(passed), detail=detail))
        self.say(f"{'ok' if passed else 'FAILED'}: {name}{f': {detail}' if detail else ''}")
        self._save()
        return bool(passed)

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """What goes wrong in this block is a failed check, and the section goes on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it was, it belongs into the report
            self.say(traceback.format_exc())
            self.check(f"{what} ran to its end", False, f"{type(error).__name__}: {error}"[:600])

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Record figures side by side."""
        cells = [[number(c) if isinstance(c, float) else str(c) for c in row] for row in rows]
        self.findings.tables.append(Table(title=title, columns=list(columns), rows=cells))
        self._save()

    def note(self, text: str) -> None:
        """Record a sentence."""
        self.findings.notes.append(text)
        self.say(text)
        self._save()

    def file(self, name: str, text: str) -> None:
        """Leave a file beside the results; few of them fit through the door of a rented machine."""
        (self._folder / name).write_text(text)
        self.note(f"see {name}")

    def say(self, text: str) -> None:
        """Print a line of progress."""
        print(text, flush=True)

    def _save(self) -> None:
        scratch = self._path.with_suffix(".new")
        scratch.write_text(self.findings.to_json())
        scratch.replace(self._path)


def number(value: float) -> str:
    """At least four digits that mean something, in few characters."""
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 0.001 or value == 0:
        return f"{value:.4g}"
    return f"{value:.2e}"
