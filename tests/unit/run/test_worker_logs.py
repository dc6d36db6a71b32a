import json
import logging
import sys

from nightmill.logs import JsonFormatter, TextFormatter, shard_context
from nightmill.records import ShardLease, ShardRange

LEASE = ShardLease(
    shard_id=9,
    job_id="job-1",
    range=ShardRange(index=3, source_file="f", row_start=0, row_end=5),
    attempt=2,
    num_failures=0,
    worker_id="w",
)


def _record(message: str = "hello %s", *args: object) -> logging.LogRecord:
    return logging.LogRecord("a.b", logging.WARNING, "f.py", 1, message, args, None)


def test_a_line_names_worker_job_shard_and_attempt_while_a_shard_is_at_work() -> None:
    formatter = JsonFormatter("w-1")
    with shard_context(LEASE):
        line = json.loads(formatter.format(_record("hello %s", "you\n")))
    assert line.pop("at").endswith("+00:00")
    assert line == {
        "level": "warning",
        "logger": "a.b",
        "message": "hello you\n",
        "worker": "w-1",
        "job": "job-1",
        "shard": 3,
        "shard_id": 9,
        "attempt": 2,
    }
    assert "job" not in json.loads(formatter.format(_record("x")))


def test_a_traceback_stays_in_one_line() -> None:
    try:
        raise ValueError("boom")
    except ValueError:
        record = _record("x")
        record.exc_info = sys.exc_info()
    text = JsonFormatter("w").format(record)
    assert "\n" not in text
    assert "ValueError: boom" in json.loads(text)["traceback"]


def test_text_has_the_shard_in_brackets() -> None:
    with shard_context(LEASE):
        assert "[job-1 shard 3 attempt 2] x" in TextFormatter().format(_record("x"))
