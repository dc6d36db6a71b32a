"""Whatever lies in the queues, a worker stays up, hears the next bell, and leaves nothing behind."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kombu
import pytest
from tests.integration.fleet_bench import FleetBench, wait_until
from tests.services.servers import RabbitmqBroker

from nightmill import messages
from nightmill.broker import Broker
from nightmill.states import Tier

NO_TASK: list[tuple[bytes, dict[str, Any]]] = [
    (body, {})
    for body in (b"", b"not json", b"\xff\xfe", b"null", b"{}", b"[]", b"[[],{},{}]", b"[" * 3000, b"x" * 100_000)
] + [
    (b"abc", {"content_type": "text/plain"}),
    (b"\x80\x04.", {"content_type": "application/x-python-serialize", "content_encoding": "binary"}),
]
ODD_HEADERS: list[dict[str, Any]] = [
    {},
    {"task": "os.system"},
    {"id": None},
    {"eta": "soon"},
    {"eta": "2099-01-01T00:00:00"},
    {"expires": "soon"},
    {"timelimit": ["a", "b"]},
]


@pytest.fixture
def fleet(tmp_path: Path, postgres_url: str, rabbitmq: RabbitmqBroker) -> Iterator[FleetBench]:
    bench = FleetBench(tmp_path, {"DATABASE_URL": postgres_url, "CELERY_BROKER_URL": rabbitmq.url}, str(tmp_path))
    yield bench
    bench.close()


def test_strange_messages_are_dropped_and_the_next_bell_is_heard(fleet: FleetBench) -> None:
    first = fleet.submit("in", 20)
    worker = fleet.start()
    fleet.wait(first)
    shard_id = 1
    url = fleet.environment["CELERY_BROKER_URL"]
    with kombu.Connection(url) as connection:
        for body, content in NO_TASK:
            _send(connection, body, messages.task_headers(1, messages.new_task_id()), **content)
        for strange in ({"v": 2, "shard_id": shard_id}, {"v": 1, "shard_id": 10**30}, {"v": 1, "shard_id": 10**9}):
            _send(connection, json.dumps([[strange], {}, {}]).encode(), messages.task_headers(1, "a"))
        for odd in ODD_HEADERS:
            headers = messages.task_headers(shard_id, messages.new_task_id()) | odd if odd else {}
            _send(connection, messages.task_body(shard_id), headers)
        callback = {"task": "nightmill.shard", "args": [], "kwargs": {}, "options": {}, "subtask_type": None}
        _send(connection, json.dumps([[messages.encode(shard_id)], {}, {"callbacks": [callback]}]).encode(), {})
    wait_until(lambda: _unacknowledged_or_waiting(fleet) == 0, "the queue is empty")
    job = fleet.submit("next", 20)
    worker.wait_for_log("committed", count=2)
    (ended,) = fleet.wait(job)
    fleet.check(ended, 20)
    assert worker.log.count("listening to") == 1, "it never lost its consumers"
    assert worker.log.count("a message is dropped") == len(NO_TASK) + 2  # the third names a shard that never was
    assert "Traceback" not in worker.log
    assert worker.process.poll() is None


def _send(connection: kombu.Connection, body: bytes, headers: dict[str, Any], **content: str) -> None:
    content = {"content_type": messages.CONTENT_TYPE, "content_encoding": messages.CONTENT_ENCODING} | content
    channel = connection.default_channel
    message = channel.prepare_message(body, headers=headers, properties={"delivery_mode": 2}, **content)
    channel.basic_publish(message, routing_key=messages.QUEUES[Tier.NORMAL])


def _unacknowledged_or_waiting(fleet: FleetBench) -> int:
    broker = Broker(fleet.environment["CELERY_BROKER_URL"])
    try:
        return broker.queue_depths()[Tier.NORMAL]
    finally:
        broker.close()
