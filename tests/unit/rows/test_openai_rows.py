import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.rows.row_inputs import codes, make_spec, rows_of, write

from nightmill.errors import ValidationError
from nightmill.records import Completion
from nightmill.rows import InputRow, job_source_schema
from nightmill.sampling import SamplingParams
from nightmill.sharding import list_sources

MESSAGES = [{"role": "user", "content": "hi"}]


def line(body: Any, url: str = "/v1/chat/completions", **fields: Any) -> str:
    return json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": body, **fields})


def rows(path: Path, *lines: str, **spec: Any) -> list[InputRow | Completion]:
    path = path / "batch.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return rows_of(make_spec(path, **spec))


def test_chat_request(tmp_path: Path) -> None:
    body = {
        "model": "gpt-4o",
        "messages": MESSAGES,
        "max_completion_tokens": 5,
        "temperature": 0.5,
        "logprobs": True,
        "top_logprobs": 2,
        "user": "u",
        "metadata": {"a": "b"},
        "stream": False,
        "response_format": {"type": "text"},
    }
    (row,) = rows(tmp_path, line(body))
    assert isinstance(row, InputRow)
    assert (row.custom_id, row.messages, row.prompt, row.chat) == ("a", MESSAGES, None, True)
    assert row.sampling == SamplingParams(max_tokens=5, temperature=0.5, logprobs=2)


@pytest.mark.parametrize("prompt", ["say hi", ["say hi"]])
def test_completion_request_is_never_templated(prompt: Any, tmp_path: Path) -> None:
    (row,) = rows(tmp_path, line({"prompt": prompt, "logprobs": 3}, "/v1/completions"))
    assert isinstance(row, InputRow)
    assert (row.prompt, row.messages, row.chat) == ("say hi", None, False)
    assert row.sampling.logprobs == 3


def test_defaults_for_a_line_without_id(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, json.dumps({"url": "/v1/completions", "body": {"prompt": "x"}}))
    assert row.custom_id == "batch.jsonl#0"


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("{broken", "invalid_messages", "not valid JSON"),
        ("[1]", "invalid_messages", "not an object"),
        ('"text"', "invalid_messages", "not an object"),
        ('{"custom_id": "a"}', "invalid_messages", "no body"),
        (line({"messages": MESSAGES}, "/v1/embeddings"), "invalid_messages", "/v1/embeddings"),
        (line([1]), "invalid_messages", "object as body"),
        (line({}), "null_prompt", "null"),
        (line({"messages": []}), "empty_prompt", "no text"),
        (line({"prompt": ""}, "/v1/completions"), "empty_prompt", "empty"),
        (line({"prompt": ["a", "b"]}, "/v1/completions"), "invalid_messages", "one string"),
        (line({"prompt": [1, 2]}, "/v1/completions"), "invalid_messages", "one string"),
        (line({"prompt": {"a": 1}}, "/v1/completions"), "invalid_messages", "must be a string"),
        (line({"messages": MESSAGES, "tools": [{}]}), "invalid_sampling_params", "'tools'"),
        (line({"messages": MESSAGES, "stream": True}), "invalid_sampling_params", "stream"),
        (line({"messages": MESSAGES, "logprobs": 3}), "invalid_sampling_params", "true or false"),
        (line({"messages": MESSAGES, "n": 4}), "invalid_sampling_params", "n must be 1"),
        (line({"messages": MESSAGES, "response_format": {"type": "json_object"}}), "invalid_schema", "not supported"),
    ],
)
def test_bad_lines_are_row_errors(text: str, code: str, says: str, tmp_path: Path) -> None:
    good = line({"messages": MESSAGES})
    found = rows(tmp_path, good, text, good)
    assert codes(found) == [None, code, None]
    assert isinstance(found[1], Completion)
    assert says in (found[1].error_message or "")


def test_a_file_of_other_lines_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "hi"}\n')
    spec = make_spec(path)
    with pytest.raises(ValidationError, match="not in OpenAI batch form"):
        job_source_schema(list_sources(spec.inputs), spec)


def test_prompt_column_means_nothing_here(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="OpenAI form"):
        rows(tmp_path, line({"messages": MESSAGES}), prompt_column="body")


def test_a_folder_of_both_forms_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", {"prompt": ["x"]})
    (tmp_path / "b.jsonl").write_text(line({"messages": MESSAGES}) + "\n")
    spec = make_spec(tmp_path)
    with pytest.raises(ValidationError, match=r"the inputs differ: .*a\.parquet"):
        job_source_schema(list_sources(spec.inputs), spec)
