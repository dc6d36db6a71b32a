import json
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightmill.canonical import decode, encode
from nightmill.records import JobOptions, JobSpec, ModelSpec, SourceFile
from nightmill.sampling import SamplingParams
from nightmill.spec import diff_sources, diff_specs, spec_digest
from nightmill.states import Tier

SPEC = JobSpec(inputs=("/in/a.parquet",), output="/out", model=ModelSpec(model="demo"))
CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"sampling": SamplingParams(temperature=0.7)}, "temperature: 0.0 → 0.7"),
    ({"sampling": SamplingParams(stop=("é",))}, 'stop: [] → ["é"]'),
    ({"sampling": SamplingParams(seed=5)}, "sampling.seed: not set → 5"),
    ({"seed": 5}, "seed: 0 → 5"),
    ({"model": ModelSpec(model="other/name")}, 'model.model: "demo" → "other/name"'),
    ({"model": ModelSpec(model="demo", dtype="float32")}, 'dtype: "auto" → "float32"'),
    ({"model": ModelSpec(model="demo", quantization="int8")}, 'quantization: not set → "int8"'),
    ({"model": ModelSpec(model="demo", max_model_len=9)}, "max_model_len: not set → 9"),
    ({"inputs": ("/in/b.parquet",)}, 'inputs: ["/in/a.parquet"] → ["/in/b.parquet"]'),
    ({"prompt_column": "text"}, 'prompt_column: not set → "text"'),
    ({"system_prompt": "Be brief."}, 'system_prompt: not set → "Be brief."'),
    ({"chat": False}, "chat: not set → false"),
    ({"output_column": "answer"}, 'output_column: "completion" → "answer"'),
    ({"output_prefix": "nm_"}, 'output_prefix: "" → "nm_"'),
    ({"strict": True}, "strict: false → true"),
]


@pytest.mark.parametrize(("changes", "line"), CHANGES)
def test_what_changes_answers_changes_the_digest_and_is_named(changes: dict[str, Any], line: str) -> None:
    changed = replace(SPEC, **changes)
    assert spec_digest(changed) != spec_digest(SPEC)
    assert diff_specs(SPEC, changed) == [line.replace("model.model", "model")]


@pytest.mark.parametrize("changes", [{"output": "/elsewhere"}, {"check_ids": False}])
def test_case_I038_the_output_path_is_no_part_of_the_digest(changes: dict[str, Any]) -> None:
    changed = replace(SPEC, **changes)
    assert spec_digest(changed) == spec_digest(SPEC)
    assert diff_specs(SPEC, changed) == []


def test_every_field_of_the_spec_is_in_the_digest_or_left_out_on_purpose() -> None:
    named = {line.split(":")[0].split(".")[0] for _, line in CHANGES}
    left = {f.name for f in fields(JobSpec)} - named - {"sampling", "model", "output", "check_ids"}
    assert left == {"messages_column", "allow_duplicate_ids"}, "add a case for a new field"


def test_an_integer_and_a_float_of_one_value_are_one_specification() -> None:
    one = replace(SPEC, sampling=SamplingParams(temperature=1))
    other = replace(SPEC, sampling=SamplingParams(temperature=1.0))
    assert spec_digest(one) == spec_digest(other)
    assert diff_specs(one, other) == []


def test_long_values_are_shortened() -> None:
    (line,) = diff_specs(SPEC, replace(SPEC, system_prompt="x" * 5000))
    assert len(line) < 120
    assert "5002 characters" in line


def test_changed_sources_are_named() -> None:
    a, b, c = (SourceFile(uri=f"/{n}", num_rows=1, size_bytes=1, etag="1-1") for n in "abc")
    assert diff_sources([a, b], [a, b]) == []
    assert diff_sources([a, b], [b, a]) == ["inputs: in another order"]
    assert diff_sources([a, b], [b, c]) == ["input /a: removed", "input /c: added"]
    assert diff_sources([a], [replace(a, num_rows=2, etag="2-1")]) == ["input /a: 1 rows → 2 rows"]
    assert diff_sources([a], [replace(a, etag="2-1")]) == ["input /a: written anew since the job was planned"]


numbers = st.floats(0, 1, allow_nan=False)
samplings = st.builds(
    SamplingParams,
    temperature=numbers,
    top_p=numbers,
    max_tokens=st.integers(1, 2**31 - 1),
    stop=st.lists(st.text(min_size=1), max_size=3).map(tuple),
    stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    ignore_eos=st.booleans(),
)
specs = st.builds(
    JobSpec,
    inputs=st.lists(st.text(), min_size=1).map(tuple),
    output=st.text(),
    model=st.builds(ModelSpec, model=st.text(), max_model_len=st.none() | st.integers(1)),
    sampling=samplings,
    seed=st.integers(),
    system_prompt=st.none() | st.text(),
    chat=st.none() | st.booleans(),
)


@given(specs)
def test_records_survive_json(spec: JobSpec) -> None:
    text = encode(spec)
    assert decode(JobSpec, text) == spec
    assert encode(decode(JobSpec, text)) == text
    assert text.isascii()


@given(specs, specs)
def test_specs_differ_exactly_when_their_digests_do(one: JobSpec, other: JobSpec) -> None:
    assert (spec_digest(one) == spec_digest(other)) == (diff_specs(one, other) == [])


def test_missing_fields_take_their_defaults() -> None:
    assert decode(JobOptions, '{"tier":"high"}') == JobOptions(tier=Tier.HIGH)


@pytest.mark.parametrize(
    "change",
    [{"new_field": 1}, {"seed": "5"}, {"seed": True}, {"seed": None}, {"inputs": "a"}, {"model": 3}, {"chat": 0}],
)
def test_what_is_not_a_spec_is_refused_by_name(change: dict[str, Any]) -> None:
    plain = json.loads(encode(SPEC)) | change
    with pytest.raises(ValueError, match=rf"{next(iter(change))}|ModelSpec"):
        decode(JobSpec, json.dumps(plain))
