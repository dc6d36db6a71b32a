"""One pooled client for each store and process, and the one loop in which requests are tried again.

botocore's own retries are off. They do not cover an answer that breaks off, they share a quota that a storm over a few
threads uses up within a second, and a conditional write must know of its earlier tries.
"""

import functools
import logging
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from nightmill.errors import StorageError
from nightmill.storage.s3_errors import S3Error, Verdict, explain, judge, request_errors
from nightmill.storage.s3_settings import S3Settings

log = logging.getLogger(__name__)
Result = TypeVar("Result")

_FIRST_DELAY_S = 0.1
_MAX_DELAY_S = 5.0
_SLOW_FACTOR = 4.0  # a store that asks for fewer requests gets them
_NEVER_REACHED_S = 10.0  # a mistyped endpoint should not look like a slow one for a minute
_MAX_RENEWALS = 3
_LOUD_AFTER = 3  # tries that nobody needs to hear of

_lock = threading.Lock()
_clients: dict[S3Settings, Any] = {}
_reached: set[S3Settings] = set()
_inherited: list[Any] = []  # a parent's clients, kept so that no socket of its is closed from here


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    _inherited.extend(_clients.values())
    _clients.clear()


os.register_at_fork(after_in_child=_after_fork)


@dataclass(frozen=True, slots=True)
class S3Connection:
    """Requests to one store. Safe to use from many threads, and in a forked child."""

    settings: S3Settings

    def call(self, action: str, uri: str, request: Callable[[Any], Result]) -> Result:
        """Send a request, again and again if need be.

        Args:
            action: What is done, for the error: "read", "write", …
            uri: To what.
            request: Gets a boto3 client; must be safe to call more than once.

        Raises:
            S3Error: refused, or no answer within the settings' patience.
        """
        errors = request_errors()
        started = time.monotonic()
        tries = renewals = 0
        while True:
            client = client_of(self.settings)
            try:
                result = request(client)
                _reached.add(self.settings)
                return result
            except errors as error:
                tries += 1
                verdict = judge(error)
                renewals += verdict is Verdict.NEW_CREDENTIALS
                since_s = time.monotonic() - started
                delay_s = _delay(tries, verdict)
                if self._gives_up(verdict, tries, renewals, since_s + delay_s):
                    raise explain(
                        error, action=action, uri=uri, settings=self.settings, tries=tries, since_s=since_s
                    ) from error
                if verdict is Verdict.NEW_CREDENTIALS:
                    forget_client(self.settings, client)
                level = logging.WARNING if tries >= _LOUD_AFTER else logging.INFO
                log.log(level, "%s %s: %s; try %d follows in %.1f s", action, uri, error, tries + 1, delay_s)
                time.sleep(delay_s)

    def _gives_up(self, verdict: Verdict, tries: int, renewals: int, then_s: float) -> bool:
        settings = self.settings
        patience_s = settings.retry_s if settings in _reached else min(settings.retry_s, _NEVER_REACHED_S)
        return (
            verdict is Verdict.FAIL
            or renewals > _MAX_RENEWALS
            or then_s > patience_s
            or (settings.max_attempts is not None and tries >= settings.max_attempts)
        )


def _delay(tries: int, verdict: Verdict) -> float:
    """Exponential with full jitter: workers that failed together must not come back together."""
    ceiling = min(_MAX_DELAY_S, _FIRST_DELAY_S * 2 ** min(tries, 10))
    return random.uniform(0, ceiling) * (_SLOW_FACTOR if verdict is Verdict.SLOW_DOWN else 1)


def client_of(settings: S3Settings) -> Any:
    """The process's client for these settings.

    Raises:
        StorageError: it cannot be made: a bad profile, for example.
    """
    with _lock:
        client = _clients.get(settings)
        if client is None:
            client = _clients[settings] = _make(settings)
        return client


def forget_client(settings: S3Settings, client: Any) -> None:
    """Have the next request look for credentials anew: botocore reads some of their sources once only."""
    with _lock:
        if _clients.get(settings) is client:
            _clients.pop(settings, None)


def client_config(settings: S3Settings, **more: Any) -> Any:
    """botocore's configuration for a store; `more` overrules."""
    from botocore.config import Config

    fields: dict[str, Any] = {
        "connect_timeout": settings.connect_timeout_s,
        "read_timeout": settings.read_timeout_s,
        "max_pool_connections": settings.max_connections,
        "tcp_keepalive": True,
        "retries": {"total_max_attempts": 1, "mode": "standard"},
        "s3": {"addressing_style": "path" if settings.path_style else "auto"},
        # Otherwise uploads are cut into signed chunks of unstated length, which older gateways refuse (411, 501).
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "user_agent_appid": "nightmill",
    }
    return Config(**(fields | more))


@functools.cache
def _loader() -> Any:
    """S3's model, parsed once for all clients."""
    import botocore.loaders

    return botocore.loaders.create_loader()


def _make(settings: S3Settings) -> Any:
    import boto3
    import botocore.session
    from botocore.exceptions import BotoCoreError

    try:
        core = botocore.session.Session()
        core.register_component("data_loader", _loader())
        session = boto3.session.Session(botocore_session=core, region_name=settings.region)
        region = session.region_name or ("us-east-1" if settings.endpoint_url else None)
        return session.client(
            "s3", endpoint_url=settings.endpoint_url, region_name=region, config=client_config(settings)
        )
    except (BotoCoreError, ValueError) as error:
        raise StorageError(
            f"cannot set up access to {settings.where}: {error}", hint="Check AWS_PROFILE and the AWS configuration."
        ) from error


__all__ = ["S3Connection", "S3Error", "client_config", "client_of", "forget_client"]
