"""From the outbox to the broker, at least once."""

from nightmill.broker import Broker
from nightmill.store import Store

BATCH = 500


def relay(store: Store, broker: Broker, *, limit: int = BATCH) -> int:
    """Ring for everything that is owed; returns how many rings left the outbox.

    Each batch is a transaction of its own: published whole and confirmed, then deleted. Several may relay at once.

    Raises:
        BrokerError: the broker takes no messages now. What it has not confirmed is owed still.
    """
    if not store.owes_rings():
        return 0
    broker.declare()  # connecting may take long: not while rows of the outbox are locked
    total = 0
    while taken := store.relay_outbox(broker.publish, limit):
        total += taken
    return total
