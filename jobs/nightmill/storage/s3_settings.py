"""How an S3 store is reached, from the environment. Credentials are not in here: botocore finds and renews them."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from nightmill.errors import ConfigError

GIB = 2**30
RETRY_S = 60.0
ADDRESSING = ("auto", "path", "virtual")
CONDITIONAL_WRITES = ("auto", "yes", "no")
ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Settings:
    """One store as one process talks to it."""

    endpoint_url: str | None = None  # AWS_ENDPOINT_URL_S3, else AWS_ENDPOINT_URL; None: AWS itself
    region: str | None = None  # AWS_REGION, else AWS_DEFAULT_REGION; None: from the AWS configuration file
    profile: str | None = None  # AWS_PROFILE; here, because another one is another identity
    access_key_id: str | None = None  # AWS_ACCESS_KEY_ID; likewise, and to name it in an error
    addressing: str = "auto"  # NIGHTMILL_S3_ADDRESSING; auto: path style for an endpoint that is not AWS
    conditional_writes: str = "auto"  # NIGHTMILL_S3_CONDITIONAL_WRITES; auto: found out by trying
    max_attempts: int | None = None  # AWS_MAX_ATTEMPTS, the first one included; None: as many as fit into retry_s
    retry_s: float = RETRY_S  # NIGHTMILL_S3_RETRY_S: a call that keeps failing is given up after this long
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 60.0
    max_connections: int = 64
    max_put_bytes: int = 5 * GIB  # S3's limit for one PUT; above it an object goes up in pieces
    piece_bytes: int = GIB // 16
    page_keys: int = 1000  # of a listing; S3's limit

    @property
    def path_style(self) -> bool:
        """`endpoint/bucket/key`: other stores' names rarely resolve as `bucket.endpoint`."""
        return self.addressing == "path" or (self.addressing == "auto" and self.endpoint_url is not None)

    @property
    def where(self) -> str:
        """The store, for people."""
        return self.endpoint_url or "AWS S3"

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> "S3Settings":
        """Read and check the variables; an empty one counts as unset.

        Raises:
            ConfigError: names the variable.
        """
        environ = os.environ if environ is None else environ
        return cls(
            # Read here: the SDKs' own handling of these came late and differs between them.
            endpoint_url=_endpoint(environ),
            region=environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or None,
            profile=environ.get("AWS_PROFILE") or None,
            access_key_id=environ.get("AWS_ACCESS_KEY_ID") or None,
            addressing=_choice(environ, "NIGHTMILL_S3_ADDRESSING", ADDRESSING),
            conditional_writes=_choice(environ, "NIGHTMILL_S3_CONDITIONAL_WRITES", CONDITIONAL_WRITES),
            max_attempts=_attempts(environ),
            retry_s=_seconds(environ, "NIGHTMILL_S3_RETRY_S", RETRY_S),
        )


def _endpoint(environ: Mapping[str, str]) -> str | None:
    for name in ENDPOINT_VARIABLES:
        if value := environ.get(name):
            parts = urlsplit(value)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ConfigError(f"{name}: {value!r} is not a URL", hint="use http://host:port or https://host")
            return value.rstrip("/")
    return None


def _choice(environ: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str:
    value = environ.get(name, "").lower() or choices[0]
    if value not in choices:
        raise ConfigError(f"{name}: {environ[name]!r} is not one of {', '.join(choices)}")
    return value


def _attempts(environ: Mapping[str, str]) -> int | None:
    value = environ.get("AWS_MAX_ATTEMPTS", "")
    if not value:
        return None
    if not (value.isascii() and value.isdigit() and int(value) > 0):
        raise ConfigError(f"AWS_MAX_ATTEMPTS: {value!r} is not a number from 1")
    return int(value)


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    value = environ.get(name, "")
    try:
        seconds = float(value) if value else default
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 86_400:
        raise ConfigError(f"{name}: {value!r} is not a number of seconds under a day")
    return seconds
