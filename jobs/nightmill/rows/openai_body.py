"""One request of an OpenAI batch file: its `body` as prompt or messages, sampling and response format."""

import json
from dataclasses import dataclass
from typing import Any

from nightmill.errors import RowError, RowErrorCode

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"

# Keys that change nothing about the answer of one offline row, or that the job decides (`model`).
_IGNORED = frozenset(
    {
        "metadata",
        "model",
        "parallel_tool_calls",
        "prompt_cache_key",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options",
        "user",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIRequest:
    """A body taken apart; the values are not checked yet."""

    chat: bool
    content: object  # `messages` of a chat request, `prompt` of a completion request
    sampling: dict[str, Any]
    response_format: object = None


def parse_request(url: str | None, body: str | None) -> OpenAIRequest:
    """Take one request apart.

    Raises:
        RowError: `invalid_messages` when the line is no request, `invalid_sampling_params` for what is not supported.
    """
    value = _object(url, body)
    if url not in (CHAT_URL, COMPLETIONS_URL):
        raise _invalid(f"url must be {CHAT_URL} or {COMPLETIONS_URL}, not {url!r}")
    chat = url == CHAT_URL
    sampling = {k: v for k, v in value.items() if v is not None and k not in _IGNORED}
    content = sampling.pop("messages" if chat else "prompt", None)
    response_format = sampling.pop("response_format", None)
    if sampling.pop("stream", False):
        raise RowError(RowErrorCode.INVALID_SAMPLING_PARAMS, "stream: a batch has nobody to stream to; leave it out")
    if chat:
        _rename_logprobs(sampling)
    elif isinstance(content, list):
        if len(content) != 1 or not isinstance(content[0], str):
            raise _invalid("prompt must be one string: one row has one completion")
        (content,) = content
    return OpenAIRequest(chat=chat, content=content, sampling=sampling, response_format=response_format)


def _object(url: str | None, body: str | None) -> dict[str, Any]:
    if body is None:
        raise _invalid("the line has no body: it is not in OpenAI batch form")
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _invalid(f"the line is not valid JSON: {error}" if url is None else f"body: {error}") from error
    if url is None or not isinstance(value, dict):
        raise _invalid("the line is not an object with custom_id, method, url and an object as body")
    return value


def _rename_logprobs(sampling: dict[str, Any]) -> None:
    """Chat requests say `logprobs: true, top_logprobs: 5` where we say `logprobs: 5`."""
    wanted = sampling.pop("logprobs", False)
    top = sampling.pop("top_logprobs", 0)
    if not isinstance(wanted, bool):
        raise RowError(RowErrorCode.INVALID_SAMPLING_PARAMS, f"logprobs must be true or false, not {wanted!r}")
    if wanted:
        sampling["logprobs"] = top


def _invalid(message: str) -> RowError:
    return RowError(RowErrorCode.INVALID_MESSAGES, message)
