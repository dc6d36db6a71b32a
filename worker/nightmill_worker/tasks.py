"""The one task: a shard's id arrives. The row decides everything, so nothing else is in the message."""

import logging
from collections.abc import Callable
from typing import Any

from celery import Celery, Task
from celery.exceptions import Reject

from nightmill.messages import QUEUES, TASK_NAME, decode
from nightmill.states import Tier
from nightmill_worker.fleet import BellEnd

log = logging.getLogger(__name__)

TIERS = {queue: tier for tier, queue in QUEUES.items()}

Answer = Callable[[int, Tier], BellEnd]
RingAgain = Callable[[int, Tier], None]


def register(app: Celery, answer: Answer, ring_again: RingAgain) -> None:
    """Give the application its task.

    Args:
        app: Of this worker.
        answer: Blocks until the message is to be acknowledged: `Fleet.answer`.
        ring_again: Publishes another message for the shard; may fail in silence, the store rings in time.
    """

    @app.task(name=TASK_NAME, bind=True, acks_late=True, ignore_result=True)  # type: ignore[untyped-decorator]
    def shard(task: Task, message: Any) -> None:
        tier = TIERS.get((task.request.delivery_info or {}).get("routing_key", ""))
        if tier is None:
            log.error("a message came through an unknown queue: %s", task.request.delivery_info)
            return
        try:
            shard_id = decode(message)
        except ValueError as error:
            log.error("a message is dropped: %s", error)
            return
        end = answer(shard_id, tier)
        if end is BellEnd.WAITED:
            ring_again(shard_id, tier)
        if end is BellEnd.STOPPED:
            raise Reject(reason="the worker stops", requeue=True)
