"""Ringing through a real RabbitMQ: confirmed, durable, and never hanging."""

import json
import threading
import time
from collections.abc import Iterator

import celery
import kombu
import pytest
from celery.worker.request import Request
from tests.services.servers import RabbitmqBroker

from nightmill import messages
from nightmill.broker import Broker, BrokerError
from nightmill.records import Ring
from nightmill.states import Tier


@pytest.fixture
def broker(rabbitmq: RabbitmqBroker) -> Iterator[Broker]:
    broker = Broker(rabbitmq.url, timeout_s=10.0)
    yield broker
    broker.close()


def rings(tier: Tier, *shard_ids: int) -> list[Ring]:
    return [Ring(shard_id=shard_id, tier=tier) for shard_id in shard_ids]


def drain(url: str, tier: Tier) -> list[kombu.Message]:
    """Take everything out of a tier's queue."""
    found = []
    with kombu.Connection(url) as connection, connection.channel() as channel:
        while (message := channel.basic_get(messages.QUEUES[tier], no_ack=True)) is not None:
            found.append(message)
    return found


def shard_ids(url: str, tier: Tier) -> list[int]:
    return [messages.decode(json.loads(message.body)[0][0]) for message in drain(url, tier)]


def test_each_ring_is_in_the_queue_of_its_tier(broker: Broker, rabbitmq: RabbitmqBroker) -> None:
    batch = [*rings(Tier.LOW, *range(500)), *rings(Tier.HIGH, 7)]
    broker.publish(batch)
    assert broker.queue_depths() == {Tier.HIGH: 1, Tier.NORMAL: 0, Tier.LOW: 500}
    assert shard_ids(rabbitmq.url, Tier.HIGH) == [7]
    assert shard_ids(rabbitmq.url, Tier.LOW) == list(range(500))
    broker.publish([])


def test_a_message_is_a_persistent_celery_task(broker: Broker, rabbitmq: RabbitmqBroker) -> None:
    broker.publish(rings(Tier.NORMAL, 42))
    (message,) = drain(rabbitmq.url, Tier.NORMAL)
    assert message.delivery_info["routing_key"] == "nightmill.normal.v1"
    assert message.properties["delivery_mode"] == 2
    assert (message.properties["content_type"], message.properties["content_encoding"]) == ("application/json", "utf-8")
    headers = message.properties["application_headers"]
    assert (headers["task"], headers["retries"], headers["eta"]) == ("nightmill.shard", 0, None)
    assert headers["id"] == message.properties["correlation_id"]


def test_celery_reads_it_as_a_task(broker: Broker, rabbitmq: RabbitmqBroker) -> None:
    """What a worker does with a delivery, up to the call: Celery's own consumer, request and tracer."""
    app = celery.Celery("test", broker=rabbitmq.url, set_as_current=False)
    heard: list[object] = []

    @app.task(name=messages.TASK_NAME)
    def shard(message: object) -> None:
        heard.append(message)

    app.finalize()
    broker.publish(rings(Tier.HIGH, 7))
    queue = kombu.Queue(messages.QUEUES[Tier.HIGH], no_declare=True)
    taken: list[kombu.Message] = []
    with app.connection_for_read() as connection:
        with connection.Consumer([queue], on_message=taken.append, accept=["json"]):
            connection.drain_events(timeout=30)
        (message,) = taken
        request = Request(message, app=app)
        assert (request.task_name, request.correlation_id) == ("nightmill.shard", request.task_id)
        args, kwargs, embed = request._payload
        request.task(*args, **kwargs)
        message.ack()
    assert [messages.decode(body) for body in heard] == [7]
    assert not any(embed.values())


def test_what_was_confirmed_survives_a_crash_of_the_broker(broker: Broker, rabbitmq: RabbitmqBroker) -> None:
    broker.publish(rings(Tier.NORMAL, *range(50)))
    rabbitmq.server.kill()
    with pytest.raises(BrokerError, match="does not publish"):
        broker.publish(rings(Tier.NORMAL, 50))
    rabbitmq.server.start()
    broker.publish(rings(Tier.NORMAL, 51))  # the same object, connected anew
    assert shard_ids(rabbitmq.url, Tier.NORMAL) == [*range(50), 51]


def test_a_wiped_broker_gets_its_queues_again(broker: Broker, rabbitmq: RabbitmqBroker) -> None:
    broker.publish(rings(Tier.NORMAL, 1))
    rabbitmq.wipe()
    assert broker.queue_depths() == {Tier.HIGH: 0, Tier.NORMAL: 0, Tier.LOW: 0}
    broker.publish(rings(Tier.NORMAL, 2))
    assert shard_ids(rabbitmq.url, Tier.NORMAL) == [2]


def test_a_queue_that_was_deleted_is_made_again(broker: Broker, rabbitmq: RabbitmqBroker) -> None:
    """Without `mandatory` the broker would confirm these and throw them away."""
    broker.publish(rings(Tier.NORMAL, 1))
    with kombu.Connection(rabbitmq.url) as connection:
        connection.channel().queue_delete(messages.QUEUES[Tier.NORMAL])
    broker.publish([*rings(Tier.HIGH, 2), *rings(Tier.NORMAL, 3, 4)])
    assert shard_ids(rabbitmq.url, Tier.NORMAL) == [3, 4]
    assert shard_ids(rabbitmq.url, Tier.HIGH) == [2], "what had arrived is not sent again"


def test_case_I092_an_alarm_does_not_hang(rabbitmq: RabbitmqBroker) -> None:
    broker = Broker(rabbitmq.url, timeout_s=3.0)
    broker.declare()
    rabbitmq.server.ctl("set_vm_memory_high_watermark", "0")
    try:
        began = time.monotonic()
        for _ in range(2):  # connected before the alarm, and after it
            with pytest.raises(BrokerError, match=r"alarm|confirm"):
                broker.publish(rings(Tier.NORMAL, 1))
        assert time.monotonic() - began < 30  # four limits of 3 s; not: for ever
    finally:
        rabbitmq.server.ctl("set_vm_memory_high_watermark", "absolute", "1GB")
    broker.publish(rings(Tier.NORMAL, 2))
    assert shard_ids(rabbitmq.url, Tier.NORMAL)[-1] == 2
    broker.close()


def test_no_broker_at_all_is_told_without_the_password() -> None:
    broker = Broker("amqp://user:secret@127.0.0.1:1/", timeout_s=2.0)
    with pytest.raises(BrokerError, match="refused") as caught:
        broker.publish(rings(Tier.NORMAL, 1))
    assert "secret" not in str(caught.value)
    broker.close()


@pytest.mark.parametrize(("wanted", "kind"), [("auto", "quorum"), ("quorum", "quorum"), ("classic", "classic")])
def test_queues_are_durable_and_of_the_type_asked_for(rabbitmq: RabbitmqBroker, wanted: str, kind: str) -> None:
    broker = Broker(rabbitmq.url, queue_type=wanted)
    broker.declare()
    broker.close()
    listed = rabbitmq.server.ctl("list_queues", "-p", rabbitmq.vhost, "name", "durable", "type")
    assert sorted(line.split() for line in listed.splitlines() if line.startswith("nightmill")) == sorted(
        [name, "true", kind] for name in messages.QUEUES.values()
    )


def test_auto_takes_what_is_there_and_quorum_insists(rabbitmq: RabbitmqBroker) -> None:
    first = Broker(rabbitmq.url, queue_type="classic")
    first.publish(rings(Tier.LOW, 1))
    first.close()
    auto = Broker(rabbitmq.url)
    auto.publish(rings(Tier.LOW, 2))
    assert auto.queue_depths()[Tier.LOW] == 2
    auto.close()
    strict = Broker(rabbitmq.url, queue_type="quorum")
    with pytest.raises(BrokerError, match="not a durable quorum queue"):
        strict.declare()
    strict.close()


def test_threads_may_share_one(broker: Broker, rabbitmq: RabbitmqBroker) -> None:
    threads = [
        threading.Thread(target=broker.publish, args=(rings(Tier.LOW, *range(n, n + 50)),)) for n in range(0, 400, 50)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(shard_ids(rabbitmq.url, Tier.LOW)) == list(range(400))
