"""Ports for services that are killed and started again at the same place."""

import random
import socket

from deploy.native.failure import ServiceError

# Below Linux' ephemeral range (32768…): inside it a client that keeps knocking at a dead service's port is one day
# given that very port as its own, is connected to itself, and the service cannot come back.
_FIRST, _LAST = 20_000, 32_000


def free_port() -> int:
    """A port on 127.0.0.1 that nobody listens at now."""
    for _ in range(200):
        port = random.SystemRandom().randrange(_FIRST, _LAST)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise ServiceError(f"found no free port between {_FIRST} and {_LAST}")


def accepts(port: int) -> bool:
    """Whether someone accepts a TCP connection at 127.0.0.1:port."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    except OSError:
        return False
    return True
