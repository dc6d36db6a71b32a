import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.rows.row_inputs import DEBIAN, codes, make_spec, rows_of, write

from nightmill.errors import RowErrorCode, ValidationError
from nightmill.reader import RowBatch, resolve_columns
from nightmill.records import Completion
from nightmill.rows import InputRow, parse_rows
from nightmill.sampling import SamplingParams
from nightmill.seeds import column_seed, request_seed


def parse(data: dict[str, Any] | pa.RecordBatch, row_start: int = 0, **spec: Any) -> list[InputRow | Completion]:
    columns = data if isinstance(data, pa.RecordBatch) else pa.record_batch(data)
    batch = RowBatch(source_file="/d/x.parquet", row_start=row_start, columns=columns)
    return list(parse_rows(batch, make_spec("/d/x.parquet", **spec)))


def one(data: dict[str, Any], **spec: Any) -> InputRow:
    (row,) = parse(data, **spec)
    assert isinstance(row, InputRow), row
    return row


def error(data: dict[str, Any], **spec: Any) -> tuple[str | None, str]:
    (row,) = parse(data, **spec)
    assert isinstance(row, Completion), row
    assert row.text is None
    assert row.finish_reason is None
    return row.error_code, row.error_message or ""


# Prompts.


def test_case_I004_empty_prompts_are_row_errors_and_neighbours_run() -> None:
    rows = parse({"prompt": ["a", "", None, "   ", "\n\t ", "b"]})
    assert codes(rows) == [None, "empty_prompt", "null_prompt", "empty_prompt", "empty_prompt", None]
    rows = parse({"messages": ["[]", None, "", '[{"role":"user","content":"  "}]', '[{"role":"user","content":"b"}]']})
    assert codes(rows) == ["empty_prompt", "null_prompt", "empty_prompt", "empty_prompt", None]


def test_prompt_is_kept_as_it_is() -> None:
    assert one({"prompt": ["  two\n\nlines \u00e9\U0001f600 "]}).prompt == "  two\n\nlines \u00e9\U0001f600 "


def test_lone_surrogates_nul_and_bad_utf8_are_replaced() -> None:
    bad = [b"a\x00b", b"\xed\xa0\x80x", b"ok\xff", b"fine"]
    for kind in (pa.string(), pa.large_string()):
        column = pa.array(bad, pa.large_binary()).cast(pa.binary() if kind == pa.string() else pa.large_binary())
        rows = parse(pa.record_batch({"prompt": column.view(kind)}))
        assert [row.prompt for row in rows if isinstance(row, InputRow)] == [
            "a\ufffdb", "\ufffd\ufffd\ufffdx", "ok\ufffd", "fine"
        ]  # fmt: skip


def test_dictionary_encoded_and_all_null_columns() -> None:
    column = pa.array(["a", None, "a"]).dictionary_encode()
    assert codes(parse({"prompt": column})) == [None, "null_prompt", None]
    assert codes(parse({"prompt": pa.nulls(2)})) == ["null_prompt"] * 2


# Messages.


def test_case_I011_arrow_padding_never_reaches_a_message() -> None:
    call = [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]
    a = [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": call}]
    b = [{"role": "user", "content": "q", "name": "bob"}]
    structs = parse({"messages": [a, b]})
    text = parse({"messages": [json.dumps(a), json.dumps(b)]})
    assert [row.messages for row in structs if isinstance(row, InputRow)] == [a, b]
    for left, right in zip(structs, text, strict=True):
        assert isinstance(left, InputRow)
        assert isinstance(right, InputRow)
        assert left.messages == right.messages


def test_messages_as_maps() -> None:
    kind = pa.list_(pa.map_(pa.string(), pa.string()))
    column = pa.array([[[("role", "user"), ("content", "hi"), ("name", None)]]], kind)
    assert one({"messages": column}).messages == [{"role": "user", "content": "hi"}]


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert one({"messages": [json.dumps([{"role": "user", "content": parts}])]}).messages == [
        {"role": "user", "content": "ab"}
    ]


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"role":"user"}', "must be a list, not dict"),
        ("3", "must be a list, not int"),
        ("null", None),
        ('["hi"]', "message 0 must be an object, not str"),
        ('[{"content":"hi"}]', "message 0 has no role"),
        ('[{"role":"","content":"hi"}]', "message 0 has no role"),
        ('[{"role":7,"content":"hi"}]', "message 0 has no role"),
        ('[{"role":"user","content":"hi"},{"role":"user"}]', "message 1 has neither content nor tool_calls"),
        ('[{"role":"user","content":7}]', "content must be text, not int"),
        ('[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]', "only text parts"),
        ('[{"role":"user","content":[{"type":"text","text":null}]}]', "only text parts"),
    ],
)
def test_bad_messages(messages: str, says: str | None) -> None:
    code, message = error({"messages": [messages]})
    assert code == ("invalid_messages" if says else "null_prompt")
    assert says is None or says in message
    assert len(message) < 500


def test_messages_are_sanitised() -> None:
    row = one({"messages": ['[{"role":"user","content":"a\\ud83d\\u0000b"}]']})
    assert row.messages == [{"role": "user", "content": "a\ufffd\ufffdb"}]


def test_bad_utf8_in_nested_messages_is_that_rows_error() -> None:
    values = pa.array([b"\xff", b"fine"], pa.binary()).view(pa.string())
    structs = pa.StructArray.from_arrays([pa.array(["user", "user"]), values], ["role", "content"])
    rows = parse({"messages": pa.ListArray.from_arrays([0, 1, 2], structs)})
    assert codes(rows) == ["invalid_messages", None]


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        (pa.timestamp("ns"), 10**18 + 1, "2001-09-09 01:46:40.000000001"),
        (pa.timestamp("us"), 2**62, None),  # the year 148107
        (pa.timestamp("us", "Mars/Phobos"), 7, "7"),
        (pa.duration("ns"), 7, "7"),
    ],
)
def test_a_time_that_python_cannot_hold_is_its_text(kind: pa.DataType, value: int, text: str | None) -> None:
    item = pa.struct([("role", pa.string()), ("content", pa.string()), ("at", kind)])
    messages = [[{"role": "user", "content": "hi", "at": pa.scalar(value, pa.int64()).cast(kind)}], None]
    rows = parse({"messages": pa.array(messages, pa.list_(item))})
    assert codes(rows) == [None, "null_prompt"]
    assert isinstance(rows[0], InputRow)
    assert rows[0].messages is not None
    at = rows[0].messages[0].pop("at")
    assert isinstance(at, str)
    assert text is None or at == text
    assert rows[0].messages == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("depth", [100, 400, 900, 980])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_deep_messages_are_that_rows_error(depth: int, opening: str, closing: str) -> None:
    deep = f'[{{"role":"user","content":"a","x":{opening * depth}1{closing * depth}}}]'
    rows = parse({"messages": [deep, '[{"role":"user","content":"b","x":[[[1]]]}]']})
    assert codes(rows) == ["invalid_messages", None]


def test_a_struct_with_two_members_of_one_name_is_a_row_error() -> None:
    params = pa.StructArray.from_arrays([pa.array([1, 2]), pa.array([3, 4])], ["seed", "seed"])
    assert codes(parse({"prompt": ["a", "b"], "sampling_params": params})) == ["invalid_sampling_params"] * 2


# Ids.


def test_default_ids_name_file_and_row() -> None:
    assert [row.custom_id for row in parse({"prompt": ["a", ""]}, row_start=41)] == ["x.parquet#41", "x.parquet#42"]


@pytest.mark.parametrize(
    "ids",
    [
        pa.array(["7", None]),
        pa.array([7, None], pa.uint8()),
        pa.array([7, None]),
        pa.array(["7", None]).dictionary_encode(),
    ],
)
def test_ids_are_strings_or_integers(ids: pa.Array) -> None:
    assert [row.custom_id for row in parse({"prompt": ["a", "b"], "custom_id": ids})] == ["7", "x.parquet#1"]


# Sampling.


def test_a_row_overrides_the_job() -> None:
    base = SamplingParams(temperature=0.5, max_tokens=7, stop=("x",))
    for override in (
        '{"temperature": 1, "max_completion_tokens": 9}',
        {"temperature": 1.0, "max_tokens": 9.0, "top_k": None},
    ):
        row = one({"prompt": ["a"], "sampling_params": [override]}, sampling=base)
        assert row.sampling == SamplingParams(temperature=1.0, max_tokens=9, stop=("x",))
    for nothing in (pa.nulls(1), ["null"], ["{}"]):
        assert one({"prompt": ["a"], "sampling_params": nothing}, sampling=base).sampling == base


def test_structs_are_padded_and_one_row_asks_less() -> None:
    rows = parse({"prompt": ["a", "b"], "sampling_params": [{"temperature": 1.0}, {"stop": ["x", "y"], "seed": 3}]})
    assert [row.sampling for row in rows if isinstance(row, InputRow)] == [
        SamplingParams(temperature=1.0),
        SamplingParams(stop=("x", "y"), seed=3),
    ]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ('{"temprature": 1}', "unknown key 'temprature'"),
        ('{"temperature": -1}', "temperature must be between"),
        ('{"temperature": NaN}', "finite"),
        ('{"max_tokens": 0}', "max_tokens"),
        ('{"n": 2}', "n must be 1"),
        ("[]", "must be an object"),
        ("{", "not valid JSON"),
        ("", "not valid JSON"),
        ('{"a":' * 100_000, "not valid JSON"),
        (f'{{"temperature": 1{"0" * 400}}}', "finite"),
        (f'{{"top_k": 1{"0" * 400}}}', "top_k must be between"),
        ('{"stop": ["x", ""]}', "empty string"),
        (f'{{"stop_token_ids": [1{"0" * 400}]}}', "stop_token_ids must lie between"),
        ('{"stop_token_ids": [-1]}', "stop_token_ids must lie between"),
    ],
)
def test_bad_sampling_params(override: str, says: str) -> None:
    code, message = error({"prompt": ["a"], "sampling_params": [override]})
    assert code == "invalid_sampling_params"
    assert says in message


@pytest.mark.parametrize("form", ['{"type": "json_object"}', '{"choice": ["a"]}', "{", "[]", '"json"'])
def test_response_format_is_not_supported_yet(form: str) -> None:
    code, _ = error({"prompt": ["a"], "response_format": [form]})
    assert code == "invalid_schema"


@pytest.mark.parametrize("form", [None, '{"type": "text"}', "null"])
def test_text_is_no_response_format(form: str | None) -> None:
    assert one({"prompt": ["a"], "response_format": pa.array([form], pa.string())}).prompt == "a"


# Seeds.


def test_seed_depends_on_job_seed_file_and_row_alone() -> None:
    rows = parse({"prompt": ["a", "b"]}, row_start=5)
    assert [row.seed for row in rows] == [request_seed(0, "x.parquet", 5), request_seed(0, "x.parquet", 6)]
    assert parse({"prompt": ["b"]}, row_start=6)[0].seed == rows[1].seed
    assert parse({"prompt": ["b"]}, row_start=6, seed=1)[0].seed != rows[1].seed
    assert parse({"prompt": ["b"]}, row_start=6, sampling=SamplingParams(seed=1))[0].seed == request_seed(
        1, "x.parquet", 6
    )


def test_request_seed_is_fixed_for_ever() -> None:
    """Changing this changes every answer of every seeded job."""
    assert request_seed(0, "x.parquet", 0) == SEED_0
    assert request_seed(1, "dir/\u00e9.parquet", 2**40, 3) == SEED_1


SEED_0, SEED_1 = 2085511028777971562, 790083185340180835


@pytest.mark.parametrize(("given", "unsigned"), [(5, 5), (-1, 2**64 - 1), (2**64 - 1, 2**64 - 1), (-(2**63), 2**63)])
def test_a_rows_own_seed_is_used_as_it_is(given: int, unsigned: int) -> None:
    row = one({"prompt": ["a"], "sampling_params": [json.dumps({"seed": given})]})
    assert row.seed == unsigned
    assert -(2**63) <= column_seed(row.seed) < 2**63
    again = one({"prompt": ["a"], "sampling_params": [json.dumps({"seed": column_seed(row.seed)})]})
    assert again.seed == row.seed


@given(st.integers(), st.text(), st.integers(0, 2**50))
def test_seeds_fit_int64(job_seed: int, name: str, row: int) -> None:
    assert 0 <= request_seed(job_seed, name, row) < 2**63


# Columns.


def test_prompt_column_and_messages_column() -> None:
    assert one({"q": ["a"], "prompt": [None]}, prompt_column="q").prompt == "a"
    assert one({"m": ['[{"role":"user","content":"a"}]'], "prompt": ["b"]}, messages_column="m").prompt is None
    assert one({"prompt": ["b"], "messages": ["[]"]}).prompt == "b"


def columns_of(*fields: tuple[str, Any]) -> pa.Schema:
    return pa.schema([("prompt", pa.string()), *fields])


STRING = pa.string()
SCHEMA_ERRORS: list[tuple[pa.Schema, dict[str, Any], str, str]] = [
    (
        pa.schema([("text", STRING), ("id", pa.int64())]),
        {},
        "neither a column `prompt` nor a column `messages`; it has text, id",
        "--prompt-column text",
    ),
    (
        pa.schema([("desription", STRING)]),
        {"prompt_column": "description"},
        "no column 'description'",
        "--prompt-column desription",
    ),
    (columns_of(), {"messages_column": "msgs"}, "no column 'msgs'", "--messages-column"),
    (pa.schema([("prompt", pa.int64())]), {}, "'prompt' must be a string, but its type is int64", "--prompt-column"),
    (pa.schema([("prompt", pa.binary())]), {}, "'prompt' must be a string, but its type is binary", "Cast"),
    (pa.schema([("messages", pa.list_(STRING))]), {}, "column 'messages' must be a list of structs", "Cast"),
    (columns_of(("custom_id", pa.float64())), {}, "'custom_id' must be a string or an integer", "Cast"),
    (columns_of(("sampling_params", pa.int8())), {}, "'sampling_params' must be a struct", "Cast"),
    (columns_of(("response_format", pa.struct([]))), {}, "column 'response_format'", "Cast"),
    (columns_of(("x", pa.int8()), ("x", pa.int8())), {}, "more than one column named 'x'", "Rename"),
    (columns_of(), {"prompt_column": "a", "messages_column": "b"}, "both given", "one of them"),
]


@pytest.mark.parametrize(("schema", "spec", "says", "hint"), SCHEMA_ERRORS)
def test_an_input_that_does_not_fit(schema: pa.Schema, spec: dict[str, Any], says: str, hint: str) -> None:
    with pytest.raises(ValidationError) as caught:
        resolve_columns(schema, make_spec("/d/x.parquet", **spec), where="/d/x.parquet")
    assert says in caught.value.message
    assert hint in (caught.value.hint or "")
    assert "/d/x.parquet" in caught.value.message or "both given" in says


# The whole.


def test_real_rows() -> None:
    rows = rows_of(make_spec(DEBIAN, prompt_column="description"), shard_rows=100)
    assert codes(rows) == [None] * 2000
    assert [row.row_index for row in rows] == list(range(2000))
    assert len({row.seed for row in rows}) == len({row.custom_id for row in rows}) == 2000


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
sampling_like = st.dictionaries(
    st.sampled_from(["temperature", "top_k", "max_tokens", "stop", "seed", "n", "logprobs", "bogus"]),
    json_values,
    max_size=3,
)
message_like = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "name"]), json_values, max_size=4), max_size=3
)


@given(
    st.lists(
        st.tuples(
            st.none() | st.text(max_size=5) | message_like.map(json.dumps) | json_values.map(json.dumps),
            st.none() | st.text(max_size=5) | sampling_like.map(json.dumps),
            st.none() | st.text(max_size=3) | json_values.map(json.dumps),
        ),
        min_size=1,
        max_size=8,
    )
)
@settings(max_examples=200, deadline=None)
def test_whatever_a_row_holds_it_is_a_request_or_its_own_error(rows: list[tuple[str | None, ...]]) -> None:
    data = {
        name: pa.array([row[i] for row in rows], pa.string())
        for i, name in enumerate(("messages", "sampling_params", "response_format"))
    }
    parsed = parse(data)
    assert [row.row_index for row in parsed] == list(range(len(rows)))
    for row in parsed:
        if isinstance(row, Completion):
            assert RowErrorCode(row.error_code or "")
            assert row.error_message
        else:
            assert row.messages
            json.dumps(row.messages, ensure_ascii=False).encode("utf-8")


def test_neighbours_of_a_bad_row_are_not_concerned(tmp_path: Path) -> None:
    good = {"prompt": ["a"] * 9, "sampling_params": [None] * 4 + ['{"bogus": 1}'] + [None] * 4}
    rows = rows_of(make_spec(write(tmp_path / "x.parquet", good)))
    assert codes(rows) == [None] * 4 + ["invalid_sampling_params"] + [None] * 4
