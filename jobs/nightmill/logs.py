"""Structured logs: one JSON object a line, with the job, shard and attempt that the writing thread works on."""

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from nightmill.records import ShardLease

FORMATS = ("text", "json")
_shard: ContextVar[dict[str, Any] | None] = ContextVar("shard", default=None)


@contextmanager
def shard_context(lease: ShardLease) -> Iterator[None]:
    """Log lines of this thread name this attempt."""
    token = _shard.set(
        {
            "job": lease.job_id,
            "shard": lease.range.index,
            "shard_id": lease.shard_id,
            "attempt": lease.attempt,
        }
    )
    try:
        yield
    finally:
        _shard.reset(token)


def set_up_logs(log_format: str, level: str, worker_id: str) -> None:
    """Send all log lines of this process to stderr.

    Args:
        log_format: One of FORMATS.
        level: As in NIGHTMILL_LOG_LEVEL.
        worker_id: Stands in each JSON line.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(worker_id) if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in ("celery", "kombu", "amqp", "botocore", "urllib3"):  # theirs at info tell of every message
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


class JsonFormatter(logging.Formatter):
    """`{"at": …, "level": …, "logger": …, "message": …, "worker": …, "job": …, "shard": …, "attempt": …}`."""

    def __init__(self, worker_id: str) -> None:
        super().__init__()
        self._worker_id = worker_id

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        fields: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "worker": self._worker_id,
            **(_shard.get() or {}),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """For people: time, level, message, and the shard in brackets."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and a traceback where there is one."""
        at = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        shard = _shard.get()
        where = f"[{shard['job']} shard {shard['shard']} attempt {shard['attempt']}] " if shard else ""
        line = f"{at} {record.levelname.lower():7} {where}{record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line
