"""The command line that makes a job: what to type to go on with it."""

import shlex
from dataclasses import fields
from typing import Any

from nightmill.job_flags import MODEL_FLAGS, OPTION_FLAGS, SAMPLING_FLAGS, SPEC_FLAGS
from nightmill.records import JobOptions, JobSpec, ModelSpec
from nightmill.sampling import SamplingParams

_NEGATED = {"chat": "no-chat", "check_ids": "no-check-ids"}


def run_command(spec: JobSpec, options: JobOptions, *, command: str = "run") -> str:
    """`nightmill run …` with every flag that is not at its default, fit for a shell."""
    words = ["nightmill", command, *spec.inputs, "-o", spec.output, "--model", spec.model.model]
    for record, names in (
        (spec.model, MODEL_FLAGS),
        (spec.sampling, SAMPLING_FLAGS),
        (spec, SPEC_FLAGS),
        (options, OPTION_FLAGS),
    ):
        defaults = _defaults(type(record))
        for name in names:
            field = "expires_in_s" if name == "expires_in" else name
            value = getattr(record, field)
            if value != defaults[field]:
                words += _flag(name, value)
    return shlex.join(words)


def _defaults(record: type[ModelSpec] | type[SamplingParams] | type[JobSpec] | type[JobOptions]) -> dict[str, Any]:
    return {field.name: field.default for field in fields(record)}


def _flag(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if value is False:
        return [f"--{_NEGATED[name]}"]
    if value is True:
        return [flag]
    if isinstance(value, tuple):
        return [word for item in value for word in (flag, str(item))]
    text = str(value)
    if name == "system_prompt" and text.startswith("@"):
        text = "@FILE"  # the text itself would be taken for a file's name; whoever wrote it has the file
    # A value that begins with a dash would be read as a flag.
    return [f"{flag}={text}"] if text.startswith("-") else [flag, text]
