"""A worker whose metrics port is taken says which, and what to do."""

import socket

import pytest
from prometheus_client import CollectorRegistry

from nightmill.errors import ConfigError
from nightmill_worker.metrics import MetricsServer


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} for metrics: Address already in use") as caught:
            MetricsServer(port, CollectorRegistry(), dict)
    assert "choose another" in str(caught.value)
