"""The one output schema of a job: all source columns as they are, then ours."""

import base64
from collections.abc import Iterable, Sequence

import pyarrow as pa
import pyarrow.types as types

from nightmill.errors import ValidationError
from nightmill.reader import is_openai_form, open_source, resolve_columns
from nightmill.reader.jsonl import JsonlSource
from nightmill.reader.many import Progress, map_files
from nightmill.records import JobSpec, SourceFile
from nightmill.storage import Storage


def output_schema(source_schema: pa.Schema, spec: JobSpec) -> pa.Schema:
    """Source columns first, unchanged; then ours, each named --output-prefix + its name.

    An input's own `custom_id` stands for ours unless a prefix keeps them apart.

    Raises:
        ValidationError: one of ours is named as a source column; the message names --output-prefix.
    """
    ours = our_fields(source_schema, spec)
    names = [field.name for field in ours]
    if spec.output_column and names.count(spec.output_prefix + spec.output_column) > 1:
        raise ValidationError(
            f"--output-column {spec.output_column} is the name of another output column", hint="Choose another name."
        )
    if not spec.output_column:
        raise ValidationError("--output-column must not be empty")
    if clash := [name for name in names if name in source_schema.names]:
        raise ValidationError(
            f"the output column {clash[0]!r} has the name of an input column",
            hint="Choose other names for the output columns: --output-prefix nm_ (or --output-column for the text).",
        )
    return pa.schema([*source_schema, *ours], metadata=source_schema.metadata)


def our_fields(source_schema: pa.Schema, spec: JobSpec) -> list[pa.Field]:
    """The columns we append, in their order."""
    fields = [
        ("custom_id", pa.string()),
        ("row_index", pa.int64()),
        ("source_file", pa.string()),
        (spec.output_column, pa.large_string()),
        ("finish_reason", pa.string()),
        ("prompt_tokens", pa.int32()),
        ("completion_tokens", pa.int32()),
        ("cached_tokens", pa.int32()),
        ("error_code", pa.string()),
        ("error_message", pa.string()),
        ("attempts", pa.int32()),
        ("model", pa.string()),
        ("seed", pa.int64()),
        ("max_tokens_effective", pa.int32()),
    ]
    if asks_logprobs(source_schema, spec):
        fields.append(("logprobs", pa.large_string()))
    named = [pa.field(spec.output_prefix + name, kind) for name, kind in fields]
    has_own_id = not spec.output_prefix and "custom_id" in source_schema.names
    return named[1:] if has_own_id else named


def asks_logprobs(source_schema: pa.Schema, spec: JobSpec) -> bool:
    """Whether the job, or any row as far as the schema tells, may ask for logprobs."""
    if spec.sampling.logprobs is not None or is_openai_form(source_schema):
        return True
    if "sampling_params" not in source_schema.names:
        return False
    kind = source_schema.field("sampling_params").type
    # JSON and maps show their keys row by row, and the schema is fixed before the first.
    return not types.is_struct(kind) or kind.get_field_index("logprobs") >= 0


def job_source_schema(
    sources: Sequence[SourceFile],
    spec: JobSpec,
    *,
    storage: Storage | None = None,
    progress: Progress | None = None,
) -> pa.Schema:
    """Read all footers and unify: the schema that every part of the job begins with.

    Raises:
        ValidationError: a file does not fit the row contract, or two files do not fit each other.
    """

    def checked(uri: str) -> tuple[str, pa.Schema]:
        with open_source(uri, storage) as file:
            if isinstance(file, JsonlSource):
                file.check_form()
            resolve_columns(file.schema, spec, where=uri)
            return uri, file.schema

    return unify_schemas(map_files(checked, [source.uri for source in sources], progress=progress))


def encode_schema(schema: pa.Schema) -> str:
    """As text, for the job store."""
    return base64.b64encode(schema.serialize().to_pybytes()).decode("ascii")


def decode_schema(text: str) -> pa.Schema:
    """What `encode_schema` has made."""
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))


def unify_schemas(schemas: Iterable[tuple[str, pa.Schema]]) -> pa.Schema:
    """One schema that all files' columns can be cast to without loss: wider strings and lists, nulls of any type.

    Column order and metadata are the first file's. `schemas`: (file, its schema).

    Raises:
        ValidationError: names both files and the column.
    """
    files = iter(schemas)
    first, unified = next(files)
    since = dict.fromkeys(unified.names, first)  # the file that a column's type comes from
    for uri, schema in files:
        if different := set(unified.names) ^ set(schema.names):
            name = min(different)
            having, lacking = (first, uri) if name in unified.names else (uri, first)
            raise ValidationError(
                f"the inputs differ: {having} has a column {name!r}, {lacking} has none",
                hint="Give all files the same columns, or run them as separate jobs.",
            )
        for position, field in enumerate(unified):
            other = schema.field(field.name)
            kind = _unify(field.type, other.type)
            if kind is None:
                raise ValidationError(
                    f"the inputs differ in column {field.name!r}: {field.type} in {since[field.name]}, "
                    f"{other.type} in {uri}",
                    hint="Cast the column to one type in all files, or run them as separate jobs.",
                )
            if kind != field.type:
                since[field.name] = uri
            merged = field.with_type(kind).with_nullable(field.nullable or other.nullable)
            unified = unified.set(position, merged)
    return unified


_WIDER = (
    (types.is_string, types.is_large_string, pa.large_string()),
    (types.is_binary, types.is_large_binary, pa.large_binary()),
)


def _unify(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """None: no type holds both without changing values."""
    if one.equals(other):
        return one
    if types.is_null(one) or types.is_null(other):
        return other if types.is_null(one) else one
    if types.is_dictionary(one) or types.is_dictionary(other):
        return _unify(_value_type(one), _value_type(other))
    for narrow, wide, kind in _WIDER:
        if (narrow(one) or wide(one)) and (narrow(other) or wide(other)):
            return kind
    if types.is_map(one) and types.is_map(other):
        key, item = _unify(one.key_type, other.key_type), _unify(one.item_type, other.item_type)
        return None if key is None or item is None else pa.map_(key, item)
    if _is_list(one) and _is_list(other):
        item = _unify(one.value_type, other.value_type)
        large = types.is_large_list(one) or types.is_large_list(other)
        if item is None:
            return None
        nullable = one.value_field.nullable or other.value_field.nullable
        return (pa.large_list if large else pa.list_)(one.value_field.with_type(item).with_nullable(nullable))
    if types.is_struct(one) and types.is_struct(other):
        return _unify_structs(one, other)
    return None


def _unify_structs(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    if [field.name for field in one] != [field.name for field in other]:
        return None
    members = []
    for left, right in zip(one, other, strict=True):
        kind = _unify(left.type, right.type)
        if kind is None:
            return None
        members.append(left.with_type(kind).with_nullable(left.nullable or right.nullable))
    return pa.struct(members)


def _value_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if types.is_dictionary(kind) else kind


def _is_list(kind: pa.DataType) -> bool:
    return bool((types.is_list(kind) or types.is_large_list(kind)) and not types.is_map(kind))
