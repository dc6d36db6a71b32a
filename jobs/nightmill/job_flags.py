"""What a caller may say about a job, by the same names on the command line and in Python.

`nightmill run`, `nightmill submit` and `nightmill.Client.submit` all end here, so that the same words give the same
specification, and so the same job.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypedDict

from nightmill.durations import parse_duration
from nightmill.records import JobInfo, JobOptions, JobSpec, ModelSpec
from nightmill.sampling import SamplingParams
from nightmill.states import Tier

MODEL_FLAGS = ("revision", "dtype", "quantization", "load_format", "max_model_len")
SAMPLING_FLAGS = (
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "stop", "stop_token_ids"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs", "ignore_eos"),
)
SPEC_FLAGS = (
    *("seed", "prompt_column", "messages_column", "system_prompt", "chat", "output_column", "output_prefix"),
    *("strict", "allow_duplicate_ids", "check_ids"),
)
OPTION_FLAGS = ("tier", "shard_rows", "max_failed_rows", "idempotency_key", "expires_in")


class JobFlags(TypedDict, total=False):
    """Every flag of a job; what is left out has the default of `nightmill submit --help`."""

    # Model
    revision: str | None
    dtype: str
    quantization: str | None
    load_format: str
    max_model_len: int | None
    # Sampling: defaults, a row's own sampling_params go before them
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_tokens: int
    min_tokens: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logprobs: int | None
    ignore_eos: bool
    seed: int
    # Rows
    prompt_column: str | None
    messages_column: str | None
    system_prompt: str | None
    chat: bool | None
    output_column: str
    output_prefix: str
    strict: bool
    allow_duplicate_ids: bool
    check_ids: bool
    # Scheduling and limits
    tier: Tier | str
    shard_rows: int
    max_failed_rows: int | None
    idempotency_key: str | None
    expires_in: str | float | timedelta | None


FLAG_NAMES = frozenset(JobFlags.__annotations__)


def read_flags(inputs: Sequence[str], output: str, model: str, flags: JobFlags) -> tuple[JobSpec, JobOptions]:
    """Make a job's specification and options of its flags.

    Raises:
        RowError: a sampling parameter is out of its range.
        ValueError: the tier or the duration is none.
        TypeError: there is no such flag.
    """
    unknown = sorted(flags.keys() - FLAG_NAMES)
    if unknown:
        raise TypeError(f"a job has no flag {', '.join(unknown)}")

    def given(names: Sequence[str]) -> dict[str, Any]:
        return {name: value for name, value in flags.items() if name in names}

    sampling = given(SAMPLING_FLAGS)
    for name in ("stop", "stop_token_ids"):
        if name in sampling:
            sampling[name] = tuple(sampling[name])
    spec = JobSpec(
        inputs=tuple(inputs),
        output=output,
        model=ModelSpec(model=model, **given(MODEL_FLAGS)),
        sampling=SamplingParams(**sampling),
        **given(SPEC_FLAGS),
    )
    options = given(OPTION_FLAGS)
    expires_in = options.pop("expires_in", None)
    if "tier" in options:
        options["tier"] = Tier(options["tier"])
    expires_in_s = None if expires_in is None else parse_duration(expires_in)
    return spec, JobOptions(**options, expires_in_s=expires_in_s)


def ignored_options(wanted: JobOptions, job: JobInfo) -> list[str]:
    """A line for each option that was asked for and that an existing job does not take over: it keeps its own."""
    lines = []
    defaults = JobOptions()
    for name, flag in _KEPT.items():
        kept, asked = getattr(job.options, name), getattr(wanted, name)
        if asked not in (kept, getattr(defaults, name)):
            lines.append(
                f"note: {flag} {_show(asked)} changes nothing: job {job.job_id} was made with {_show(kept)} before"
            )
    return lines


_KEPT = {
    "shard_rows": "--shard-rows",
    "tier": "--tier",
    "max_failed_rows": "--max-failed-rows",
    "expires_in_s": "--expires-in",
}


def _show(value: object) -> str:
    return "(not set)" if value is None else f"{value:g} s" if isinstance(value, float) else str(value)
