"""The flags of a job, shared by `nightmill run` and `nightmill submit`, by what they are about.

Where vLLM has a flag of the same meaning, its name is ours.
"""

from pathlib import Path
from typing import Any, cast

import click

from nightmill.cli.param_types import Duration
from nightmill.cli.sections import section
from nightmill.errors import RowError
from nightmill.job_flags import FLAG_NAMES, JobFlags, read_flags
from nightmill.records import JobOptions, JobSpec
from nightmill.states import Tier

_positive = click.IntRange(1)

input_options = section(
    "Input and output",
    click.option("-o", "--output", required=True, metavar="DIR", help="For the parts: new, empty, or this job's."),
    click.option("--prompt-column", metavar="NAME", help="Column with the prompts.  [default: prompt]"),
    click.option("--messages-column", metavar="NAME", help="Column with chat messages.  [default: messages]"),
    click.option("--system-prompt", metavar="TEXT|@FILE", help="Put before every row that has no system message."),
    click.option("--chat/--no-chat", default=None, help="Use the chat template.  [default: when the model has one]"),
    click.option("--allow-duplicate-ids", is_flag=True, help="Accept a custom_id that stands in several rows."),
    click.option("--check-ids/--no-check-ids", default=True, help="Look for duplicate ids first.", show_default=True),
    click.option("--output-column", default="completion", show_default=True, metavar="NAME", help="For the text."),
    click.option("--output-prefix", default="", metavar="TEXT", help="Before the name of every column we add."),
)

model_options = section(
    "Model",
    click.option(
        "--model",
        required=True,
        metavar="MODEL",
        help="A directory, a .gguf file, a hub id (org/name), s3://…, or demo: a small model for trying things out.",
    ),
    click.option("--revision", metavar="REV", help="Branch, tag or commit of a hub model."),
    click.option(
        "--dtype",
        type=click.Choice(["auto", "bfloat16", "float16", "float32"]),
        default="auto",
        show_default=True,
        help="Of weights and KV.",
    ),
    click.option(
        "--quantization",
        type=click.Choice(["int8"]),
        help="int8: faster on CPUs, and other answers than without.  [default: none]",
    ),
    click.option(
        "--load-format",
        type=click.Choice(["auto", "dummy"]),
        default="auto",
        show_default=True,
        help="dummy: random weights from the config alone, for measurements.",
    ),
    click.option("--max-model-len", type=_positive, metavar="N", help="Prompt and completion tokens of a row at most."),
)

sampling_options = section(
    "Sampling: defaults, a row's sampling_params go before them",
    click.option("--max-tokens", type=_positive, default=256, show_default=True, help="Generated tokens of a row."),
    click.option("--min-tokens", type=click.IntRange(0), default=0, show_default=True, help="No stop before these."),
    click.option("--temperature", type=float, default=0.0, show_default=True, help="0: the most likely token."),
    click.option("--top-p", type=float, default=1.0, show_default=True),
    click.option("--top-k", type=int, default=0, show_default=True, help="0: all."),
    click.option("--min-p", type=float, default=0.0, show_default=True),
    click.option("--stop", multiple=True, metavar="TEXT", help="End a completion before this text; may be repeated."),
    click.option("--stop-token-ids", type=int, multiple=True, metavar="ID", help="May be repeated."),
    click.option("--presence-penalty", type=float, default=0.0, show_default=True),
    click.option("--frequency-penalty", type=float, default=0.0, show_default=True),
    click.option("--repetition-penalty", type=float, default=1.0, show_default=True),
    click.option(
        "--logprobs", type=click.IntRange(0, 20), metavar="K", help="Log probabilities of K tokens a position."
    ),
    click.option("--ignore-eos", is_flag=True, help="Go on to --max-tokens."),
    click.option("--seed", type=int, default=0, show_default=True, help="Of every random draw, with the row's place."),
    click.option("--strict", is_flag=True, help="max_tokens beyond the context is a row error, not a shorter answer."),
)

job_options = section(
    "Job",
    click.option(
        "--tier",
        type=click.Choice([tier.value for tier in Tier]),
        default=Tier.NORMAL.value,
        show_default=True,
        help="high goes before normal, normal before low; none starves.",
    ),
    click.option("--shard-rows", type=_positive, default=2000, show_default=True, help="Rows of an output part."),
    click.option("--max-failed-rows", type=click.IntRange(0), metavar="N", help="Stop when more rows than this fail."),
    click.option("--expires-in", type=Duration(), help="Stop after this long: 90s, 30m, 12h, 2d."),
    click.option("--idempotency-key", metavar="TEXT", help="A second job with this key is the first one."),
)


def job_flags(command: Any) -> Any:
    """Every flag of a job, in sections."""
    for options in (job_options, sampling_options, model_options, input_options):
        command = options(command)
    return command


def read_job(inputs: tuple[str, ...], output: str, flags: dict[str, Any]) -> tuple[JobSpec, JobOptions]:
    """What the flags of a command say of its job; other flags in `flags` are left alone.

    Raises:
        click.UsageError: a value is no good; it says which.
    """
    refuse_bad_text({"INPUT": inputs, "output": output, **flags})
    named = {name: value for name, value in flags.items() if name in FLAG_NAMES}
    named["system_prompt"] = text_or_file(named["system_prompt"])
    try:
        return read_flags(inputs, output, flags["model"], cast(JobFlags, named))
    except RowError as error:
        raise click.UsageError(error.message) from error


def refuse_bad_text(flags: dict[str, Any]) -> None:
    """Bytes that are no UTF-8 reach us as surrogates, which no file and no database of ours can hold."""
    for name, value in flags.items():
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and not text.isascii() and text != text.encode(errors="replace").decode():
                flag = name if name.isupper() else "--" + name.replace("_", "-")
                raise click.UsageError(f"{flag} is not valid UTF-8: {text!r}")


def text_or_file(value: str | None) -> str | None:
    """The text, or with @ before it what that file holds; UsageError when it cannot be read."""
    if value is None or not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text(encoding="utf-8").rstrip("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"--system-prompt {value}: {error}") from error
