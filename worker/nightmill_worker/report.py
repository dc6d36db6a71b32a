"""What a run tells whoever started it: phases, progress, and the result. No terminal in here."""

from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """A moment of a run. Rates are over the last seconds, not since the start."""

    rows_total: int
    rows_completed: int
    rows_failed: int
    rows_per_s: float
    tokens_per_s: float  # generated
    running: int  # sequences in the batch
    waiting: int  # requests that wait, in the engine or before it
    eta_s: float | None  # None: unknown
    note: str = ""  # "looking for the row that ends the engine", "draining", …


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """How a run ended. Rows are the whole job's, tokens too; steps and seconds are this run's."""

    job: str
    rows: int
    rows_ok: int
    rows_failed: int
    rows_resumed: int  # taken from what earlier attempts had finished
    rows_recomputed: int  # had been in an engine before, and were lost with it
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    steps: int
    mean_batch: float  # sequences in a step
    seconds: float
    output: str
    generated_per_s: float = 0.0  # tokens, while the engine ran
    roofline_share: float | None = None  # of the least time the device could take, see EngineStats; None: not measured
    engine_deaths: int = 0
    preemptions: int = 0  # rows taken off the engine for want of pages, or for a more urgent one, and resumed
    preemptions_swap: int = 0  # of those: kept on the host, the others computed again
    peak_rss_bytes: int = 0  # of this process and of its largest child, added
    error_codes: dict[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The object of `nightmill run --json`."""
        return {
            "job": self.job,
            "rows": self.rows,
            "rows_ok": self.rows_ok,
            "rows_failed": self.rows_failed,
            "rows_resumed": self.rows_resumed,
            "rows_recomputed": self.rows_recomputed,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
            "steps": self.steps,
            "mean_batch": round(self.mean_batch, 2),
            "preemptions": self.preemptions,
            "engine_deaths": self.engine_deaths,
            "roofline_share": None if self.roofline_share is None else round(self.roofline_share, 4),
            "seconds": round(self.seconds, 3),
            "output": self.output,
        }


class Reporter(Protocol):
    """Told about a run by its main thread."""

    def phase(self, text: str) -> None:
        """What happens now, before the first row and after the last."""
        ...

    def note(self, text: str) -> None:
        """Something worth a line that stays."""
        ...

    def progress(self, progress: RunProgress) -> None:
        """A few times a second while rows run."""
        ...


class SilentReporter:
    """Says nothing; for use from Python."""

    def phase(self, text: str) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def progress(self, progress: RunProgress) -> None:
        """Nothing."""
