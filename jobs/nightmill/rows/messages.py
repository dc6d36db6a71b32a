"""Chat messages from a row: Arrow structs or JSON to plain dicts that a chat template can render."""

import json
from typing import Any

from nightmill.errors import RowError, RowErrorCode
from nightmill.reader.text import sanitized

MAX_DEPTH = 64
"""Of lists and objects in a message: no template looks deeper, and Python's stack ends at a few hundred."""


def clean_messages(value: object) -> list[dict[str, Any]]:
    """Check and normalise the messages of one row.

    Null members are removed (Arrow pads structs with keys a message never had), text parts are joined to one string
    (many templates know no parts), lone surrogates and NULs are replaced.

    Raises:
        RowError: `null_prompt`, `empty_prompt` or `invalid_messages`, naming the message at fault.
    """
    if isinstance(value, str):
        value = _parse(value)
    if value is None:
        raise RowError(RowErrorCode.NULL_PROMPT, "messages is null")
    if not isinstance(value, list):
        raise _invalid(f"messages must be a list, not {_kind(value)}")
    messages = [_message(position, item) for position, item in enumerate(value)]
    if not any(_says_something(message) for message in messages):
        raise RowError(RowErrorCode.EMPTY_PROMPT, "messages holds no text")
    return messages


def _parse(text: str) -> object:
    if not text.strip():
        raise RowError(RowErrorCode.EMPTY_PROMPT, "messages is empty")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _invalid(f"messages is not valid JSON: {error}") from error


def _message(position: int, item: object) -> dict[str, Any]:
    message = plain(item)
    if not isinstance(message, dict):
        raise _invalid(f"message {position} must be an object, not {_kind(item)}")
    role = message.get("role")
    if not isinstance(role, str) or not role.strip():
        raise _invalid(f"message {position} has no role")
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = _joined(position, content)
    elif content is not None and not isinstance(content, str):
        raise _invalid(f"message {position}: content must be text, not {_kind(content)}")
    if "content" not in message and not message.get("tool_calls"):
        raise _invalid(f"message {position} has neither content nor tool_calls")
    return message


def _joined(position: int, parts: list[Any]) -> str:
    texts = []
    for part in parts:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str) or (
            isinstance(part, dict) and part.get("type", "text") not in ("text", "input_text")
        ):
            raise _invalid(f"message {position}: only text parts are supported")
        texts.append(text)
    return "".join(texts)


def _says_something(message: dict[str, Any]) -> bool:
    content = message.get("content")
    return bool((isinstance(content, str) and content.strip()) or message.get("tool_calls"))


def plain(value: object, *, depth: int = 0) -> Any:
    """Lists and dicts without null members, text sanitised; Arrow maps (lists of pairs) become dicts.

    Raises:
        RowError: `invalid_messages`, for what is nested more than MAX_DEPTH levels deep.
    """
    if isinstance(value, str):
        return sanitized(value)
    if depth > MAX_DEPTH and isinstance(value, (dict, list)):
        raise _invalid(f"nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, dict):
        return {
            sanitized(str(key)): plain(member, depth=depth + 1) for key, member in value.items() if member is not None
        }
    if isinstance(value, list):
        if value and all(isinstance(item, tuple) and len(item) == 2 for item in value):
            return plain(dict(value), depth=depth)
        return [plain(item, depth=depth + 1) for item in value]
    return value


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__


def _invalid(message: str) -> RowError:
    return RowError(RowErrorCode.INVALID_MESSAGES, message)
