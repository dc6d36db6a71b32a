"""Ring for what was just written. Rows are truth: a broker that is down delays a job, and loses nothing."""

from nightmill.config import Settings
from nightmill.store import Store


def ring(store: Store, settings: Settings) -> str | None:
    """Publish what waits in the outbox; returns why that could not be done, in words, and None when all is rung."""
    return None
