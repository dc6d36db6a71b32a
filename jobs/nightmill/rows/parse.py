"""Rows to requests. A row that cannot become one becomes its own error; its neighbours never notice."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.types as types

from nightmill.errors import RowError, RowErrorCode
from nightmill.reader import InputColumns, RowBatch, resolve_columns
from nightmill.reader.text import sanitized
from nightmill.records import Completion, JobSpec
from nightmill.rows.messages import clean_messages, plain
from nightmill.rows.openai_body import parse_request
from nightmill.sampling import SamplingParams, merge_sampling
from nightmill.seeds import explicit_seed, request_seed
from nightmill.sharding import source_name

MAX_MESSAGE_CHARS = 1000
"""An error may quote what the row holds, and that may be long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRow:
    """A row that may run. Exactly one of `prompt` and `messages` is set."""

    row_index: int  # from 0 in its source file
    custom_id: str
    prompt: str | None = None  # not blank, valid Unicode
    messages: list[dict[str, Any]] | None = None  # at least one, without null members
    sampling: SamplingParams
    seed: int  # unsigned 64 bit
    chat: bool | None = None  # overrides the job's `chat`: False for OpenAI completion requests
    response_format: dict[str, Any] | None = None  # never set yet: structured output is refused


def parse_rows(batch: RowBatch, spec: JobSpec) -> Iterator[InputRow | Completion]:
    """Turn each row of a batch into a request or, when it cannot run, into its final error. In order, one for one."""
    columns = resolve_columns(batch.columns.schema, spec, where=batch.source_file)
    defaults = replace(spec.sampling, seed=None)
    job_seed = spec.seed if spec.sampling.seed is None else spec.sampling.seed
    name = source_name(spec.inputs, batch.source_file)
    ids = custom_ids(batch, spec)
    for position, cells in enumerate(_cells(batch.columns, columns)):
        row_index = batch.row_start + position
        try:
            request = _openai_row(cells, defaults) if columns.openai else _table_row(cells, columns, defaults)
        except RowError as error:
            yield Completion(
                row_index=row_index,
                custom_id=ids[position],
                error_code=error.code.value,
                error_message=sanitized(error.message[:MAX_MESSAGE_CHARS]),
            )
            continue
        own = request.sampling.seed
        seed = request_seed(job_seed, name, row_index) if own is None else explicit_seed(own)
        yield InputRow(
            row_index=row_index,
            custom_id=ids[position],
            prompt=request.prompt,
            messages=request.messages,
            sampling=request.sampling,
            seed=seed,
            chat=request.chat,
        )


def custom_ids(batch: RowBatch, spec: JobSpec) -> list[str]:
    """The id of each row: its own, or `<file>#<row>` where it has none. `batch` may hold only the id column."""
    name = source_name(spec.inputs, batch.source_file)
    given: list[Any] = [None] * batch.num_rows
    if "custom_id" in batch.columns.schema.names:
        given = _values(batch.columns.column("custom_id"))
    return [
        # Arrow text has no surrogates: NUL is all that can be wrong with it.
        f"{name}#{row_index}" if value is None else str(value).replace("\x00", "\ufffd")
        for row_index, value in enumerate(given, start=batch.row_start)
    ]


@dataclass(frozen=True, slots=True)
class _BadCell:
    """Stands for a nested value that holds bytes that are no text."""

    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    sampling: SamplingParams
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    chat: bool | None = None


def _table_row(cells: dict[str, Any], columns: InputColumns, defaults: SamplingParams) -> _Request:
    if columns.response_format is not None:
        _refuse_response_format(cells[columns.response_format])
    sampling = defaults
    if columns.sampling_params is not None:
        sampling = _sampling(defaults, cells[columns.sampling_params])
    if columns.prompt is not None:
        return _Request(prompt=_prompt(cells[columns.prompt]), sampling=sampling)
    assert columns.messages is not None
    value = cells[columns.messages]
    if isinstance(value, _BadCell):
        raise RowError(RowErrorCode.INVALID_MESSAGES, value.problem)
    return _Request(messages=clean_messages(value), sampling=sampling)


def _openai_row(cells: dict[str, Any], defaults: SamplingParams) -> _Request:
    request = parse_request(cells["url"], cells["body"])
    _refuse_response_format(request.response_format)
    sampling = merge_sampling(defaults, request.sampling)
    if request.chat:
        return _Request(messages=clean_messages(request.content), sampling=sampling, chat=True)
    if request.content is not None and not isinstance(request.content, str):
        raise RowError(RowErrorCode.INVALID_MESSAGES, "prompt must be a string")
    return _Request(prompt=_prompt(request.content), sampling=sampling, chat=False)


def _prompt(value: str | None) -> str:
    if value is None:
        raise RowError(RowErrorCode.NULL_PROMPT, "the prompt is null")
    if not value.strip():
        raise RowError(RowErrorCode.EMPTY_PROMPT, "the prompt is blank" if value else "the prompt is empty")
    return sanitized(value)


def _sampling(defaults: SamplingParams, value: Any) -> SamplingParams:
    if isinstance(value, _BadCell):
        raise RowError(RowErrorCode.INVALID_SAMPLING_PARAMS, value.problem)
    return merge_sampling(defaults, value if isinstance(value, str) or value is None else plain(value))


def _refuse_response_format(value: object) -> None:
    """Ask for nothing, or for text, and you get text; all else is not supported yet."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RowError(RowErrorCode.INVALID_SCHEMA, f"response_format is not valid JSON: {error}") from error
    if value is None or (isinstance(value, dict) and value.get("type") == "text"):
        return
    raise RowError(
        RowErrorCode.INVALID_SCHEMA,
        'response_format: structured output is not supported yet; leave it null, or give {"type": "text"}',
    )


def _cells(batch: pa.RecordBatch, columns: InputColumns) -> Iterator[dict[str, Any]]:
    names = columns.names
    for values in zip(*(_values(batch.column(name)) for name in names), strict=True):
        yield dict(zip(names, values, strict=True))


def _values(column: pa.Array) -> list[Any]:
    """Python values of a column. Not every Arrow value has one: one bad cell must not stop the rest."""
    if _has_nanoseconds(column.type):  # Python has none: with pandas installed they would be its objects
        return [_decoded(scalar) for scalar in column]
    try:
        values: list[Any] = column.to_pylist()
    except (ValueError, OverflowError):  # not UTF-8, nanoseconds, a year that Python does not count to
        return [_decoded(scalar) for scalar in column]
    return values


def _decoded(scalar: pa.Scalar) -> Any:
    if types.is_dictionary(scalar.type):
        scalar = scalar.value
    try:
        return _leafwise(scalar)
    except UnicodeDecodeError as error:
        if types.is_nested(scalar.type):
            return _BadCell(f"not valid UTF-8: {error}")
        return bytes(scalar.as_buffer()).decode("utf-8", "replace")
    except (ValueError, OverflowError) as error:
        return _BadCell(f"cannot be read: {error}")


def _leafwise(scalar: pa.Scalar) -> Any:
    """As `as_py`, but a time that Python has no object for is its text."""
    kind = scalar.type
    if not scalar.is_valid:
        return None
    if types.is_struct(kind):
        if kind.num_fields > len({field.name for field in kind}):
            raise ValueError("two members of a struct have one name")
        return {field.name: _leafwise(scalar[index]) for index, field in enumerate(kind)}
    if types.is_map(kind):
        return [(_leafwise(pair[0]), _leafwise(pair[1])) for pair in scalar.values]
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return [_leafwise(item) for item in scalar.values]
    try:
        return _microseconds(scalar).as_py()
    except (ValueError, OverflowError):
        if types.is_temporal(kind):
            return _time_text(scalar)
        raise


def _has_nanoseconds(kind: pa.DataType) -> bool:
    if types.is_dictionary(kind):
        return _has_nanoseconds(kind.value_type)
    if types.is_nested(kind):
        return any(_has_nanoseconds(kind.field(index).type) for index in range(kind.num_fields))
    return types.is_temporal(kind) and getattr(kind, "unit", None) == "ns"


def _microseconds(scalar: pa.Scalar) -> pa.Scalar:
    """A time in nanoseconds as one in microseconds; raises ValueError when it has any."""
    kind = scalar.type
    if not types.is_temporal(kind) or getattr(kind, "unit", None) != "ns":
        return scalar
    if types.is_timestamp(kind):
        return scalar.cast(pa.timestamp("us", kind.tz))
    return scalar.cast(pa.time64("us") if types.is_time64(kind) else pa.duration("us"))


def _time_text(scalar: pa.Scalar) -> str:
    try:
        return str(scalar.cast(pa.string()).as_py())
    except pa.ArrowException:  # a time zone nobody knows
        return str(scalar.value)
