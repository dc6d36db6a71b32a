"""The Celery application: its settings are the protocol, and each was paid for by a run without it."""

from typing import Any

from celery import Celery
from kombu import Queue


def make_app(broker_url: str, worker_id: str) -> Celery:
    """An application that publishes nothing and consumes through `tiers`.

    Args:
        broker_url: amqp://…
        worker_id: Names the queue that the built-in consumer gets, so that it leaves ours alone.
    """
    app = Celery("nightmill", broker=broker_url, set_as_current=False, fixups=[])
    app.conf.update(_settings(f"nightmill.unused.{worker_id}"))
    return app


def _settings(unused: str) -> dict[str, Any]:
    return {
        # Text only: a message is never code.
        "task_serializer": "json",
        "result_serializer": "json",
        "accept_content": ["json"],
        "result_accept_content": ["json"],
        # Rows are truth: nobody reads results.
        "result_backend": None,
        "task_ignore_result": True,
        "task_store_errors_even_if_ignored": False,
        # The broker's window is the back-pressure.
        "task_acks_late": True,
        "task_reject_on_worker_lost": True,
        "worker_prefetch_multiplier": 1,
        # Else a worker is deaf for 3–38 s after each restart of the broker.
        "worker_enable_prefetch_count_reduction": False,
        # Else a consumer timeout ends the worker.
        "broker_channel_error_retry": True,
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "broker_connection_retry": True,
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        "broker_connection_timeout": 4.0,
        "broker_heartbeat": 10,
        "broker_transport_options": {"confirm_publish": True},
        # Nothing that needs another process, another queue, or other workers.
        "worker_send_task_events": False,
        "worker_enable_remote_control": False,
        "worker_hijack_root_logger": False,
        "worker_redirect_stdouts": False,
        "control_queue_exclusive": True,
        "event_queue_exclusive": True,
        "enable_utc": True,
        # The built-in consumer's queue. Exclusive: RabbitMQ 4.3 refuses transient queues that are not.
        "task_queues": [Queue(unused, routing_key=unused, durable=False, exclusive=True, auto_delete=True)],
        "task_default_queue": unused,
        "task_create_missing_queues": False,
    }
