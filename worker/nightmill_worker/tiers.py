"""Consumers of the tiers' queues: one channel and one prefetch window each, inside one Celery worker.

What is prefetched cannot be overtaken, so an urgent message must never share a window with bulk ones.
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from celery import Celery, bootsteps
from kombu import Consumer, Queue

from nightmill.errors import NightmillError
from nightmill.messages import (
    CONTENT_ENCODING,
    CONTENT_TYPE,
    QUEUES,
    new_task_id,
    read_task,
    task_body,
    task_headers,
)
from nightmill.states import Tier

log = logging.getLogger(__name__)

PULSE_S = 2.0


def add_tier_consumers(
    app: Celery,
    slots: Mapping[Tier, int],
    *,
    declare: Callable[[], None],
    handles: Callable[[int], bool],
    pulse: Callable[[], None],
) -> None:
    """Make workers of this application consume every tier with a slot.

    Args:
        app: Of this worker.
        slots: Prefetch window by tier.
        declare: Makes the queues, in case the broker has lost them.
        handles: Whether a message for this shard says nothing new here.
        pulse: Called when a message comes and every PULSE_S while the connection's loop turns.
    """

    class TierConsumers(bootsteps.StartStopStep):  # type: ignore[misc]  # celery has no types
        """Celery makes an instance for its consumer, and starts it anew after each reconnect."""

        requires = ("celery.worker.consumer.tasks:Tasks",)

        def __init__(self, parent: Any, **kwargs: Any) -> None:
            self.consumers: list[Any] = []
            super().__init__(parent, **kwargs)

        def start(self, parent: Any) -> None:
            """Open the channels."""
            try:
                declare()
            except NightmillError as error:
                raise ConnectionError(str(error)) from error  # what Celery retries
            handle = parent.create_task_handler()
            self.consumers = []
            for tier, window in slots.items():
                if window:
                    consumer = _consumer(parent, tier, window)
                    consumer.on_message = partial(_receive, handle, handles, pulse)
                    consumer.consume()
                    self.consumers.append(consumer)
            parent.timer.call_repeatedly(PULSE_S, pulse)
            pulse()
            log.info("listening to %s", ", ".join(QUEUES[tier] for tier, window in slots.items() if window))

        def stop(self, parent: Any) -> None:
            """Consume no more; what was delivered stays ours to acknowledge."""
            self._each(parent, "cancel")

        def shutdown(self, parent: Any) -> None:
            """Close the channels; the broker takes back what was not acknowledged."""
            self._each(parent, "close")
            self.consumers = []

        def _each(self, parent: Any, action: str) -> None:
            errors = (*parent.connection_errors, *parent.channel_errors)
            for consumer in self.consumers:
                try:
                    getattr(consumer, action)()
                except errors as error:  # the connection is gone, and the consumer with it
                    log.debug("%s of a consumer: %s", action, error)

    app.steps["consumer"].add(TierConsumers)


def _consumer(parent: Any, tier: Tier, window: int) -> Any:
    queue = Queue(QUEUES[tier], no_declare=True)
    return Consumer(
        parent.connection.channel(),
        [queue],
        accept=["json"],
        auto_declare=False,
        prefetch_count=window,
        on_decode_error=parent.on_decode_error,
    )


def _receive(
    handle: Callable[[Any], None], handles: Callable[[int], bool], pulse: Callable[[], None], message: Any
) -> None:
    pulse()
    try:
        shard_id = read_task(message.body)
    except ValueError as error:
        # Not Celery's: what it cannot parse ends its consumer, and comes again to whoever connects next.
        log.error("a message is dropped: %s", error)
        message.reject_log_error(log, (OSError,))
        return
    if handles(shard_id):
        # After a reconnect the broker delivers again what we still work on: without a thread for it.
        message.ack_log_error(log, (OSError,))
        return
    # The id is all we take from outside. An eta, a callback or a broken header would be obeyed, or end the consumer.
    message.body, message.headers = task_body(shard_id), task_headers(shard_id, new_task_id())
    message.content_type, message.content_encoding = CONTENT_TYPE, CONTENT_ENCODING
    handle(message)
