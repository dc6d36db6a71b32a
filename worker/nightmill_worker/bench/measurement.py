"""One timed run of one engine over one workload."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What a run took and produced. `output_tokens` counts only tokens a row asked for, never padding."""

    engine: str
    workload: str
    rows: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    rows_wrong_length: int
    detail: dict[str, float | int] = field(default_factory=dict)

    @property
    def output_tokens_per_s(self) -> float:
        """Generated tokens per second of wall time."""
        return self.output_tokens / self.seconds

    @property
    def total_tokens_per_s(self) -> float:
        """Prompt and generated tokens per second of wall time."""
        return (self.prompt_tokens + self.output_tokens) / self.seconds
