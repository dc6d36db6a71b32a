"""Which columns of an input a job's requests are made from, and whether their types fit (design: the row contract)."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.types as types

from nightmill.errors import ValidationError
from nightmill.reader.source import is_openai_form
from nightmill.records import JobSpec

CUSTOM_ID = "custom_id"
SAMPLING_PARAMS = "sampling_params"
RESPONSE_FORMAT = "response_format"


@dataclass(frozen=True, slots=True, kw_only=True)
class InputColumns:
    """Names of the columns of each role; None = the input has none."""

    openai: bool = False  # rows are OpenAI requests: url and body instead of the columns below
    prompt: str | None = None
    messages: str | None = None
    custom_id: str | None = None
    sampling_params: str | None = None
    response_format: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """All that must be read."""
        if self.openai:
            return (CUSTOM_ID, "url", "body")
        roles = (self.prompt, self.messages, self.custom_id, self.sampling_params, self.response_format)
        return tuple(name for name in roles if name is not None)


def resolve_columns(schema: pa.Schema, spec: JobSpec, *, where: str) -> InputColumns:
    """Find the job's columns in an input's schema.

    Raises:
        ValidationError: a column is missing, is there twice or has a type of no use; names `where`, column and remedy.
    """
    if repeated := sorted({name for name in schema.names if schema.names.count(name) > 1}):
        raise ValidationError(
            f"{where} has more than one column named {repeated[0]!r}", hint="Rename or drop one of them."
        )
    if is_openai_form(schema):
        if spec.prompt_column or spec.messages_column:
            raise ValidationError(
                f"{where} is a batch file in OpenAI form: its prompts are in `body`",
                hint="Leave out --prompt-column and --messages-column.",
            )
        return InputColumns(openai=True, custom_id=CUSTOM_ID)
    prompt, messages = _prompt_column(schema, spec, where)
    columns = InputColumns(
        prompt=prompt,
        messages=messages,
        custom_id=_optional(schema, CUSTOM_ID),
        sampling_params=_optional(schema, SAMPLING_PARAMS),
        response_format=_optional(schema, RESPONSE_FORMAT),
    )
    _check_types(schema, columns, where)
    return columns


def _prompt_column(schema: pa.Schema, spec: JobSpec, where: str) -> tuple[str | None, str | None]:
    if spec.prompt_column and spec.messages_column:
        raise ValidationError("--prompt-column and --messages-column are both given", hint="Give one of them.")
    for name, flag in ((spec.prompt_column, "--prompt-column"), (spec.messages_column, "--messages-column")):
        if name and name not in schema.names:
            raise ValidationError(
                f"{where} has no column {name!r}; it has {_listing(schema)}", hint=_did_you_mean(name, schema, flag)
            )
    if spec.prompt_column or spec.messages_column:
        return spec.prompt_column, spec.messages_column
    if "prompt" in schema.names:
        return "prompt", None
    if "messages" in schema.names:
        return None, "messages"
    raise ValidationError(
        f"{where} has neither a column `prompt` nor a column `messages`; it has {_listing(schema)}",
        hint=_did_you_mean("prompt", schema, "--prompt-column"),
    )


def _listing(schema: pa.Schema) -> str:
    shown = ", ".join(schema.names[:20]) or "no columns"
    return shown + (f" and {len(schema.names) - 20} more" if len(schema.names) > 20 else "")


def _did_you_mean(name: str, schema: pa.Schema, flag: str) -> str:
    texts = [field.name for field in schema if is_text(field.type)]
    close = difflib.get_close_matches(name, schema.names, n=1, cutoff=0.5) or texts[:1]
    return f"Name the column: {flag} {close[0] if close else 'NAME'}"


def _optional(schema: pa.Schema, name: str) -> str | None:
    return name if name in schema.names else None


def _check_types(schema: pa.Schema, columns: InputColumns, where: str) -> None:
    checks: tuple[tuple[str | None, Callable[[pa.DataType], bool], str], ...] = (
        (columns.prompt, is_text, "must be a string"),
        (columns.messages, _is_messages, "must be a list of structs (role, content) or a JSON string"),
        (columns.custom_id, is_id, "must be a string or an integer"),
        (columns.sampling_params, _is_object, "must be a struct or a JSON string"),
        (columns.response_format, is_text, "must be a JSON string"),
    )
    for name, fits, wanted in checks:
        if name is not None and not fits(kind := schema.field(name).type):
            raise ValidationError(
                f"{where}: column {name!r} {wanted}, but its type is {kind}",
                hint=f"Cast or rename {name!r} in the input"
                + (", or name another one with --prompt-column." if name == columns.prompt else "."),
            )


def is_text(kind: pa.DataType) -> bool:
    """Strings of any width, dictionary-encoded or not; a column of nulls alone has no type of its own."""
    if types.is_dictionary(kind):
        kind = kind.value_type
    return bool(
        types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind) or types.is_null(kind)
    )


def is_id(kind: pa.DataType) -> bool:
    """What custom_id may be."""
    return is_text(kind) or bool(types.is_integer(kind))


def _is_object(kind: pa.DataType) -> bool:
    return is_text(kind) or bool(types.is_struct(kind) or types.is_map(kind))


def _is_messages(kind: pa.DataType) -> bool:
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if not is_list or types.is_map(kind):
        return is_text(kind)
    item = kind.value_type
    return bool(types.is_struct(item) or types.is_map(item) or types.is_null(item))
