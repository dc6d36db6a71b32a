"""Parts as the two JSON-lines files of an OpenAI batch: results, and errors."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, BinaryIO

import pyarrow.parquet as pq

from nightmill.errors import NotFoundError
from nightmill.reader import is_openai_form, reading
from nightmill.records import JobSpec
from nightmill.rows.openai_body import COMPLETIONS_URL
from nightmill.storage import Storage, open_storage


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIFiles:
    """How many lines went where."""

    num_results: int
    num_errors: int


def write_openai_files(
    output: str,
    results: BinaryIO,
    errors: BinaryIO,
    *,
    spec: JobSpec,
    job_id: str,
    created: int = 0,
    storage: Storage | None = None,
) -> OpenAIFiles:
    """Stream a job's parts, in their order, into two files of JSON lines.

    Args:
        output: The job's output folder.
        results: Gets a line for each row with a completion.
        errors: Gets a line for each row with an error_code.
        spec: Of the job: how its columns are named.
        job_id: Goes into the ids of the lines.
        created: `created` of each completion, Unix seconds.
        storage: Of the output.

    Raises:
        NotFoundError: there are no parts.
        StorageError: a part cannot be read.
    """
    storage = storage or open_storage(output)
    num_results = num_errors = 0
    for row in _rows(storage, output, spec):
        line = _line(row, spec, job_id, created)
        data = json.dumps(line, ensure_ascii=False).encode() + b"\n"
        if line["error"] is None:
            results.write(data)
            num_results += 1
        else:
            errors.write(data)
            num_errors += 1
    return OpenAIFiles(num_results=num_results, num_errors=num_errors)


_NAMES = (
    "row_index",
    "source_file",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "error_code",
    "error_message",
    "model",
    "logprobs",
)
_PART = re.compile(r"part-(\d+)\.parquet")


def _rows(storage: Storage, output: str, spec: JobSpec) -> Iterator[dict[str, Any]]:
    parts = sorted(
        (int(match[1]), info.uri)
        for info in storage.list(output)
        if (match := _PART.fullmatch(PurePosixPath(info.uri).name))
    )
    if not parts:
        raise NotFoundError(f"{output} holds no parts", hint="Is the job done? See nightmill status.")
    for _, uri in parts:
        with reading(uri), storage.open_input(uri) as stream:
            file = pq.ParquetFile(stream, pre_buffer=False)
            schema = file.schema_arrow
            columns = {name: spec.output_prefix + name for name in _NAMES}
            columns["text"] = spec.output_prefix + spec.output_column
            prefixed = spec.output_prefix + "custom_id"
            columns["custom_id"] = prefixed if prefixed in schema.names else "custom_id"
            if is_openai_form(schema):
                columns["url"] = "url"
            present = {key: name for key, name in columns.items() if name in schema.names}
            for batch in file.iter_batches(batch_size=256, columns=list(set(present.values())), use_threads=False):
                lists = {key: batch.column(name).to_pylist() for key, name in present.items()}
                for position in range(batch.num_rows):
                    yield {key: values[position] for key, values in lists.items()}


def _line(row: dict[str, Any], spec: JobSpec, job_id: str, created: int) -> dict[str, Any]:
    place = f"{row['source_file']}#{row['row_index']}"
    custom_id = place if row["custom_id"] is None else str(row["custom_id"])
    line: dict[str, Any] = {"id": f"batch_req_{job_id}_{place}", "custom_id": custom_id}
    if row["error_code"] is not None:
        return {**line, "response": None, "error": {"code": row["error_code"], "message": row["error_message"]}}
    chat = spec.chat is not False if row.get("url") is None else row["url"] != COMPLETIONS_URL
    response = {"status_code": 200, "request_id": line["id"], "body": _body(row, line["id"], created, chat=chat)}
    return {**line, "response": response, "error": None}


def _body(row: dict[str, Any], request_id: str, created: int, *, chat: bool) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "finish_reason": row["finish_reason"], "logprobs": None}
    if chat:
        choice["message"] = {"role": "assistant", "content": row["text"], "refusal": None}
    else:
        choice["text"] = row["text"]
    if row.get("logprobs") is not None:
        choice["logprobs"] = json.loads(row["logprobs"])
    prompt, completion = row["prompt_tokens"] or 0, row["completion_tokens"] or 0
    return {
        "id": ("chatcmpl-" if chat else "cmpl-") + request_id.removeprefix("batch_req_"),
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": row["model"],
        "choices": [choice],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": row["cached_tokens"] or 0},
        },
    }
