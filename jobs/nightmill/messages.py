"""What travels through the broker: a shard's id, as a bell. Rows are truth, so a message carries nothing that can age.

A message is a Celery task message (protocol 2, JSON): kombu alone can publish it, a Celery worker consumes it.
https://docs.celeryq.dev/en/stable/internals/protocol.html
"""

import json
import uuid
from collections.abc import Mapping
from typing import Any

from nightmill.states import Tier

VERSION = 1
TASK_NAME = "nightmill.shard"
"""Called as `task(message)` with the dict of `encode` as its only argument."""
QUEUES: Mapping[Tier, str] = {tier: f"nightmill.{tier.value}.v{VERSION}" for tier in Tier}
"""One durable queue for each tier; the version of the message is in its name."""

CONTENT_TYPE = "application/json"
CONTENT_ENCODING = "utf-8"

_MAX_BYTES = 4096  # of a body; ours have about 120
_MAX_ID = 2**63 - 1  # what the store can hold


def encode(shard_id: int) -> dict[str, int]:
    """The message that rings for a shard."""
    return {"v": VERSION, "shard_id": shard_id}


def decode(body: object) -> int:
    """The shard id of a message.

    Raises:
        ValueError: it is not one of ours, or of another version.
    """
    if not isinstance(body, dict) or body.get("v") != VERSION:
        raise ValueError(f"not a message of version {VERSION}: {_short(body)}")
    shard_id = body.get("shard_id")
    if isinstance(shard_id, bool) or not isinstance(shard_id, int) or not 0 <= shard_id <= _MAX_ID:
        raise ValueError(f"a message without a shard id: {_short(body)}")
    return shard_id


def read_task(body: bytes | memoryview | str) -> int:
    """The shard id in the body of a task message, as it came from the broker.

    Raises:
        ValueError: it is not one of ours, or of another version.
    """
    text = body if isinstance(body, str) else bytes(body)
    if len(text) > _MAX_BYTES:
        raise ValueError(f"a message of {len(text):,} bytes is none of ours: {_short(text[:40])}")
    try:
        (message,), _, _ = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"not a message of version {VERSION}: {_short(text)}") from error
    return decode(message)


def task_body(shard_id: int) -> bytes:
    """Body of the task message: arguments, keyword arguments, embedded signatures (none)."""
    embed = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
    return json.dumps([[encode(shard_id)], {}, embed], separators=(",", ":")).encode()


def task_headers(shard_id: int, task_id: str) -> dict[str, Any]:
    """Headers of the task message. No eta, expiry, retries or time limits: the row decides all that."""
    return {
        "lang": "py",
        "task": TASK_NAME,
        "id": task_id,
        "root_id": task_id,
        "parent_id": None,
        "group": None,
        "eta": None,
        "expires": None,
        "retries": 0,
        "timelimit": [None, None],
        "argsrepr": f"({encode(shard_id)!r},)",
        "kwargsrepr": "{}",
        "origin": "nightmill",
        "ignore_result": True,
    }


def new_task_id() -> str:
    """A ring's own id: two rings for one shard are two messages."""
    return str(uuid.uuid4())


def _short(body: object) -> str:
    text = repr(body)
    return text if len(text) <= 200 else f"{text[:200]}…"
