from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.unit.rows.row_inputs import make_spec, write

from nightmill.errors import ValidationError
from nightmill.rows import job_source_schema, output_schema, unify_schemas
from nightmill.sampling import SamplingParams
from nightmill.sharding import list_sources

OURS = [
    ("custom_id", pa.string()),
    ("row_index", pa.int64()),
    ("source_file", pa.string()),
    ("completion", pa.large_string()),
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


def test_source_columns_first_then_ours() -> None:
    source = pa.schema(
        [pa.field("prompt", pa.string(), nullable=False, metadata={"a": "b"}), ("tags", pa.list_(pa.string()))],
        metadata={"pandas": "{}"},
    )
    schema = output_schema(source, make_spec("x"))
    assert [(field.name, field.type) for field in schema][2:] == OURS
    assert pa.schema(list(schema)[:2]).equals(pa.schema(list(source)), check_metadata=True)
    assert schema.metadata == source.metadata


def test_own_custom_id_stands_for_ours() -> None:
    source = pa.schema([("custom_id", pa.int64()), ("prompt", pa.string())])
    assert output_schema(source, make_spec("x")).names == ["custom_id", "prompt", *(name for name, _ in OURS[1:])]
    prefixed = output_schema(source, make_spec("x", output_prefix="nm_"))
    assert prefixed.names == ["custom_id", "prompt", *(f"nm_{name}" for name, _ in OURS)]


@pytest.mark.parametrize("name", ["model", "seed", "completion", "row_index", "error_code"])
def test_a_clash_names_the_way_out(name: str) -> None:
    source = pa.schema([("prompt", pa.string()), (name, pa.string())])
    with pytest.raises(ValidationError) as caught:
        output_schema(source, make_spec("x"))
    assert repr(name) in caught.value.message
    assert "--output-prefix" in str(caught.value)
    assert name in output_schema(source, make_spec("x", output_prefix="nm_")).names


def test_output_column() -> None:
    source = pa.schema([("prompt", pa.string()), ("completion", pa.string())])
    assert output_schema(source, make_spec("x", output_column="answer")).field("answer").type == pa.large_string()
    for bad in ("model", ""):
        with pytest.raises(ValidationError, match="--output-column"):
            output_schema(source, make_spec("x", output_column=bad))


@pytest.mark.parametrize(
    ("params", "spec", "present"),
    [
        (None, {}, False),
        (None, {"sampling": SamplingParams(logprobs=0)}, True),
        (pa.struct([("temperature", pa.float64())]), {}, False),
        (pa.struct([("logprobs", pa.int64())]), {}, True),
        (pa.string(), {}, True),  # JSON: nobody knows before the last row
    ],
)
def test_logprobs_when_asked(params: pa.DataType | None, spec: dict[str, Any], present: bool) -> None:
    fields = [("prompt", pa.string())] + ([("sampling_params", params)] if params else [])
    assert ("logprobs" in output_schema(pa.schema(fields), make_spec("x", **spec)).names) is present


# Case I009: several files.


def test_case_I009_widths_and_nulls_are_unified() -> None:
    first = pa.schema([("a", pa.string()), ("b", pa.null()), ("c", pa.list_(pa.null()))], metadata={"k": "first"})
    second = pa.schema(
        [
            ("c", pa.large_list(pa.struct([("x", pa.string())]))),
            ("a", pa.large_string()),
            pa.field("b", pa.struct([pa.field("m", pa.int8(), nullable=False)]), nullable=False),
        ]
    )
    for pair in ([("f1", first), ("f2", second)], [("f1", first), ("f2", second), ("f3", first)]):
        unified = unify_schemas(pair)
        assert unified.names == ["a", "b", "c"]
        assert unified.field("a").type == pa.large_string()
        assert unified.field("b").type == second.field("b").type
        assert unified.field("b").nullable
        assert unified.field("c").type == second.field("c").type
        assert unified.metadata == first.metadata


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.struct([("a", pa.int8())]), pa.string()),
        (pa.int32(), pa.int64()),
        (pa.int64(), pa.float64()),
        (pa.struct([("a", pa.int8())]), pa.struct([("a", pa.int8()), ("b", pa.int8())])),
        (pa.timestamp("us", "UTC"), pa.timestamp("us")),
        (pa.list_(pa.int8()), pa.list_(pa.int16())),
        (pa.decimal128(10, 2), pa.decimal128(12, 2)),
    ],
)
def test_case_I009_what_would_change_values_is_refused(one: pa.DataType, other: pa.DataType, tmp_path: Path) -> None:
    for name, kind in (("f1", one), ("f2", other)):
        table = pa.table({"prompt": pa.array(["x"]), "meta": pa.nulls(1, kind)})
        write(tmp_path / f"{name}.parquet", table)
    spec = make_spec(tmp_path)
    with pytest.raises(ValidationError) as caught:
        job_source_schema(list_sources(spec.inputs), spec)
    for word in ("f1.parquet", "f2.parquet", "'meta'"):
        assert word in str(caught.value)


def test_case_I009_the_file_at_fault_is_named() -> None:
    schemas = [("f1", pa.schema([("m", pa.null())])), ("f2", pa.schema([("m", pa.int8())]))]
    with pytest.raises(ValidationError, match="int8 in f2, string in f3"):
        unify_schemas([*schemas, ("f3", pa.schema([("m", pa.string())]))])


def test_case_I009_a_missing_column_names_both_files() -> None:
    one, other = pa.schema([("p", pa.string()), ("x", pa.int8())]), pa.schema([("p", pa.string())])
    for pair in ([("f1", one), ("f2", other)], [("f2", other), ("f1", one)]):
        with pytest.raises(ValidationError, match="f1 has a column 'x', f2 has none"):
            unify_schemas(pair)


def test_case_I009_a_column_is_nullable_when_it_is_so_anywhere() -> None:
    def schemas(nullable: bool) -> pa.Schema:
        inner = pa.field("m", pa.int8(), nullable=nullable)
        kinds = [pa.int8(), pa.struct([inner]), pa.list_(inner)]
        return pa.schema([pa.field(str(n), kind, nullable=nullable) for n, kind in enumerate(kinds)])

    for first, second in ((False, True), (True, False)):
        assert unify_schemas([("f1", schemas(first)), ("f2", schemas(second))]).equals(schemas(True))
    assert unify_schemas([("f1", schemas(False)), ("f2", schemas(False))]).equals(schemas(False))


def test_dictionaries_and_their_values() -> None:
    coded = pa.schema([("c", pa.dictionary(pa.int8(), pa.string()))])
    assert unify_schemas([("f1", coded), ("f2", coded)]).equals(coded)
    plain = pa.schema([("c", pa.string())])
    assert unify_schemas([("f1", coded), ("f2", plain)]).equals(plain)
