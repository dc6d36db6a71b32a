"""Nightmill control plane: jobs, shards, rows, output. Never imports torch."""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from nightmill.client import Client as Client
    from nightmill.client import Job as Job


def __getattr__(name: str) -> object:
    """`from nightmill import Client`, imported when it is asked for: every command imports this package."""
    if name in ("Client", "Job"):
        from nightmill import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
