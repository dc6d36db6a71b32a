import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.output.output_jobs import SmallJob, answer
from tests.unit.rows.row_inputs import make_spec, write

from nightmill.errors import NotFoundError
from nightmill.output.openai import write_openai_files


def convert(job: SmallJob) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    results, errors = io.BytesIO(), io.BytesIO()
    counts = write_openai_files(job.folder.root, results, errors, spec=job.spec, job_id=job.job_id, created=5)
    lines = [[json.loads(line) for line in file.getvalue().splitlines()] for file in (results, errors)]
    assert (counts.num_results, counts.num_errors) == (len(lines[0]), len(lines[1]))
    return lines[0], lines[1]


def test_jsonl_in_jsonl_out(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    requests = [
        {"custom_id": "c", "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "hé"}]}},
        {"custom_id": "bad", "url": "/v1/chat/completions", "body": {"messages": []}},
        {"custom_id": "t", "url": "/v1/completions", "body": {"prompt": "once"}},
    ]
    path.write_text("\n".join(json.dumps(request) for request in requests))
    job = SmallJob(make_spec(path, output=tmp_path / "out"))
    for shard in job.shards:
        job.part(shard, job.completions(shard, lambda row: answer(row, text=row.custom_id, logprobs='{"content": []}')))
    (chat, text), (error,) = convert(job)
    assert chat == {
        "id": "batch_req_job-1_in.jsonl#0",
        "custom_id": "c",
        "response": {
            "status_code": 200,
            "request_id": "batch_req_job-1_in.jsonl#0",
            "body": {
                "id": "chatcmpl-job-1_in.jsonl#0",
                "object": "chat.completion",
                "created": 5,
                "model": "fake",
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": "c", "refusal": None},
                        "finish_reason": "stop",
                        "logprobs": {"content": []},
                    }
                ],
                "usage": {
                    "prompt_tokens": 3,
                    "completion_tokens": 4,
                    "total_tokens": 7,
                    "prompt_tokens_details": {"cached_tokens": 1},
                },
            },
        },
        "error": None,
    }
    assert text["response"]["body"]["object"] == "text_completion"
    assert text["response"]["body"]["choices"][0]["text"] == "t"
    assert error == {
        "id": "batch_req_job-1_in.jsonl#1",
        "custom_id": "bad",
        "response": None,
        "error": {"code": "empty_prompt", "message": "messages holds no text"},
    }


def test_parquet_rows_too_each_once_in_order(tmp_path: Path) -> None:
    data = {"prompt": [str(n) if n % 5 else "" for n in range(40)], "custom_id": [*range(39), None]}
    path = write(tmp_path / "in.parquet", data, row_group_size=7)
    job = SmallJob(make_spec(path, output=tmp_path / "out", output_prefix="nm_", chat=False), shard_rows=7)
    job.run()
    results, errors = convert(job)
    ids = [*map(str, range(39)), "in.parquet#39"]
    assert [line["custom_id"] for line in results] == [name for n, name in enumerate(ids) if n % 5]
    assert [line["custom_id"] for line in errors] == ids[::5]
    assert len({line["id"] for line in results + errors}) == 40
    assert results[0]["response"]["body"]["object"] == "text_completion"
    plain = SmallJob(replace(job.spec, output=str(tmp_path / "out2"), output_prefix="", chat=None), shard_rows=7)
    plain.run()
    results, _ = convert(plain)
    assert results[-1]["custom_id"] == "in.parquet#39"
    assert results[0]["response"]["body"]["object"] == "chat.completion"


def test_nothing_there(tmp_path: Path) -> None:
    job = SmallJob(make_spec(write(tmp_path / "in.parquet", {"prompt": ["a"]}), output=tmp_path / "out"))
    with pytest.raises(NotFoundError, match="no parts"):
        convert(job)
