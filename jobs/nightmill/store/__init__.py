"""The job store: the one place that knows what is done. All SQL of nightmill is in this package."""

from nightmill.store.leases import HEARTBEAT_S, LEASE_TTL_S
from nightmill.store.store import Store

__all__ = ["HEARTBEAT_S", "LEASE_TTL_S", "Store"]
