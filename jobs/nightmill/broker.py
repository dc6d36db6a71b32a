"""The broker, as far as the control plane needs it: declare the queues, ring, ask how long they are. No Celery here.

A batch is sent whole, then all its confirms are awaited: one by one it would be a round trip and an fsync for each.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import amqp
import kombu
from kombu.exceptions import KombuError

from nightmill import messages
from nightmill.errors import BrokerError
from nightmill.records import Ring
from nightmill.states import Tier

__all__ = ["Broker", "BrokerError", "QueueType"]

QueueType = Literal["auto", "quorum", "classic"]

_FIRST_WITH_QUORUM = (3, 8)
_FAILURES = (OSError, amqp.AMQPError, KombuError)
Result = TypeVar("Result")


class Broker:
    """A connection that opens at its first use, and again after it was lost. Safe to share between threads.

    Args:
        url: amqp://user:password@host:5672/vhost; several, divided by `;`, are tried in turn.
        timeout_s: For each of connecting, declaring, and publishing a batch. A broker whose alarm is on takes nothing
            and says nothing: without a limit of our own we would wait for ever.
        queue_type: Of queues that do not exist yet; auto: quorum where the broker has them.
    """

    def __init__(self, url: str, *, timeout_s: float = 10.0, queue_type: str = "auto") -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._queue_type = queue_type
        self._lock = threading.Lock()
        self._session: _Session | None = None

    def publish(self, rings: Sequence[Ring]) -> None:
        """Send a batch; returns when the broker has stored every message of it.

        Raises:
            BrokerError: it did not confirm all of them in time. Some may have got there: send the batch again later.
        """
        with self._lock:
            missing = self._do("publish", lambda session: session.publish(rings))
            if missing:  # somebody deleted a queue while we were connected
                self._do("declare its queues", lambda session: session.declare())
                missing = self._do("publish", lambda session: session.publish(missing))
            if missing:
                raise BrokerError(f"the broker {self.name} has no queue for {len(missing)} of {len(rings)} messages")

    def declare(self) -> None:
        """Connect, and make the queues that are not there; those that are, are taken as they are (auto) or must fit.

        Raises:
            BrokerError: it cannot be reached, or a queue exists and is of another type than was asked for.
        """
        with self._lock:
            self._do("declare its queues", lambda session: session.declare())

    def queue_depths(self) -> dict[Tier, int]:
        """Messages that wait in each queue; those that a worker has taken and not acknowledged are not counted."""
        with self._lock:
            return self._do("tell how long its queues are", lambda session: session.declare())

    def close(self) -> None:
        """Close the connection. The next use opens a new one."""
        with self._lock:
            if self._session is not None:
                self._session.close()
                self._session = None

    @property
    def name(self) -> str:
        """The URL without its password."""
        return str(kombu.Connection(self._url).as_uri())

    def _do(self, what: str, action: "Callable[[_Session], Result]") -> Result:
        """Run an action; on a connection that was lost since its last use once more, on a new one."""
        is_new = self._session is None
        try:
            try:
                return action(self._open())
            except _FAILURES as error:
                self._drop()
                if is_new or isinstance(error, TimeoutError):
                    raise
                return action(self._open())
        except _FAILURES as error:
            self._drop()
            reason = str(error) or type(error).__name__
            raise BrokerError(
                f"the broker {self.name} does not {what}: {reason}",
                hint="check that RabbitMQ runs and CELERY_BROKER_URL is right; what is owed to it stays in the store",
            ) from error
        except BaseException:
            self._drop()  # its channel is in the middle of something
            raise

    def _open(self) -> "_Session":
        if self._session is None:
            self._session = _Session(self._url, self._timeout_s, self._queue_type)
            self._session.declare()
        return self._session

    def _drop(self) -> None:
        if self._session is not None:
            self._session.drop()
            self._session = None


class _Session:
    """One connection with one channel in confirm mode."""

    def __init__(self, url: str, timeout_s: float, queue_type: str) -> None:
        self._timeout_s = timeout_s
        self._queue_type = queue_type
        self._blocked: str | None = None
        self._kombu = kombu.Connection(
            url,
            connect_timeout=timeout_s,
            transport_options={
                "read_timeout": timeout_s,
                "write_timeout": timeout_s,
                "on_blocked": self._on_blocked,
            },
        )
        tries = max(1, len(self._kombu.alt))  # each of the hosts once
        self._kombu.ensure_connection(max_retries=tries - 1, interval_start=0, reraise_as_library_errors=False)
        self._connection = self._kombu.connection
        try:
            self._open_channel()
        except BaseException:
            self.drop()
            raise

    def _open_channel(self) -> None:
        self._channel = self._connection.channel()
        self._confirms = _Confirms()
        self._channel.events["basic_ack"].add(self._confirms.on_ack)
        self._channel.events["basic_nack"].add(self._confirms.on_nack)
        self._channel.events["basic_return"].add(self._confirms.on_return)
        self._channel.confirm_select()

    def declare(self) -> dict[Tier, int]:
        """Make the queues that are not there; returns how many messages wait in each."""
        return {tier: self._declare(queue) for tier, queue in messages.QUEUES.items()}

    def _declare(self, queue: str) -> int:
        kind = self._queue_type
        if kind == "auto":
            kind = "quorum" if _has_quorum(self._connection.server_properties) else "classic"
        arguments = {"x-queue-type": "quorum"} if kind == "quorum" else {}
        try:
            answer = self._channel.queue_declare(queue, durable=True, auto_delete=False, arguments=arguments)
        except amqp.PreconditionFailed as error:  # closes the channel
            self._open_channel()
            if self._queue_type != "auto":
                raise BrokerError(
                    f"the queue {queue} exists and is not a durable {kind} queue: {error.reply_text}",
                    hint="delete the queue (shards are rung for again), or unset NIGHTMILL_QUEUE_TYPE",
                ) from error
            answer = self._channel.queue_declare(queue, passive=True)
        return int(answer.message_count)

    def publish(self, rings: Sequence[Ring]) -> list[Ring]:
        """Send and await all confirms; returns those for which there is no queue."""
        deadline = time.monotonic() + self._timeout_s
        confirms = self._confirms
        for ring in rings:
            message, task_id = self._message(ring)
            confirms.expect(task_id, ring)
            self._channel.basic_publish(
                message, routing_key=messages.QUEUES[ring.tier], mandatory=True, timeout=_left(deadline)
            )
            self._check_alarm()
        while confirms.waiting:
            self._connection.drain_events(timeout=_left(deadline))
            self._check_alarm()
        return confirms.take_returned()

    def _message(self, ring: Ring) -> tuple[Any, str]:
        task_id = messages.new_task_id()
        message = self._channel.prepare_message(
            messages.task_body(ring.shard_id),
            content_type=messages.CONTENT_TYPE,
            content_encoding=messages.CONTENT_ENCODING,
            headers=messages.task_headers(ring.shard_id, task_id),
            properties={"delivery_mode": 2, "correlation_id": task_id, "message_id": task_id},
        )
        return message, task_id

    def _on_blocked(self, reason: str) -> None:
        self._blocked = reason

    def _check_alarm(self) -> None:
        if self._blocked is not None:
            raise BrokerError("the broker has an alarm on (memory or disk) and takes no messages: see its log")

    def close(self) -> None:
        """End in order."""
        try:
            self._connection.close()
        except _FAILURES:
            pass
        finally:
            self.drop()

    def drop(self) -> None:
        """Close the socket, say nothing: a broker that does not answer would let us wait."""
        self._connection.collect()


@dataclass(slots=True)
class _Sent:
    task_id: str
    ring: Ring


class _Confirms:
    """Which messages of a channel are confirmed, refused or returned. Delivery tags count from 1."""

    def __init__(self) -> None:
        self.waiting: dict[int, _Sent] = {}
        self._last_tag = 0
        self._returned: set[str] = set()
        self._unroutable: list[Ring] = []

    def expect(self, task_id: str, ring: Ring) -> None:
        """A message is about to be sent."""
        self._last_tag += 1
        self.waiting[self._last_tag] = _Sent(task_id, ring)

    def on_ack(self, delivery_tag: int, multiple: bool) -> None:
        """Stored, or returned before this."""
        tags = [tag for tag in self.waiting if tag <= delivery_tag] if multiple else [delivery_tag]
        for tag in tags:
            sent = self.waiting.pop(tag, None)
            if sent is not None and sent.task_id in self._returned:
                self._returned.discard(sent.task_id)
                self._unroutable.append(sent.ring)

    def on_nack(self, delivery_tag: int, multiple: bool) -> None:
        """The broker could not store it."""
        raise BrokerError("the broker refused a message (nack): a queue of it is broken or full, see its log")

    def on_return(self, error: Exception, exchange: str, routing_key: str, message: Any) -> None:
        """No queue for it. The ack follows."""
        self._returned.add(message.properties["message_id"])

    def take_returned(self) -> list[Ring]:
        """Those that no queue took."""
        unroutable, self._unroutable = self._unroutable, []
        return unroutable


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("it did not confirm in time")
    return left


def _has_quorum(server: Any) -> bool:
    version = str(server.get("version", "")).split(".")
    numbers = tuple(int(number) for number in version[:2] if number.isdigit())
    return server.get("product") == "RabbitMQ" and numbers >= _FIRST_WITH_QUORUM
