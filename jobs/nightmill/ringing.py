"""Ring for what was just written. Rows are truth: a broker that is down delays a job, and loses nothing."""

from nightmill.config import Settings
from nightmill.errors import BrokerError
from nightmill.store import Store


def ring(store: Store, settings: Settings) -> str | None:
    """Publish what waits in the outbox; returns why that could not be done, in words, and None when all is rung.

    Without a broker in the settings nothing is done: whoever has one relays the outbox, and workers look into the
    store by themselves.
    """
    if settings.broker_url is None:
        return None
    from nightmill.broker import Broker  # kombu takes a while that other commands do not need
    from nightmill.relay import relay

    broker = Broker(settings.broker_url, queue_type=settings.queue_type)
    try:
        relay(store, broker)
    except BrokerError as error:
        return error.message
    finally:
        broker.close()
    return None
