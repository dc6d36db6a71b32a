"""Settings from the environment, read once. An unknown or bad value stops the start and names the variable."""

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nightmill.errors import ConfigError
from nightmill.failpoint import parse_failpoints

LOG_LEVELS = ("debug", "info", "warning", "error")
QUEUE_TYPES = ("auto", "quorum", "classic")
CPU_ISAS = ("amx_bf16", "avx512_bf16", "avx512", "avx2", "portable", "reference")
_VARIABLES = frozenset(
    {
        "NIGHTMILL_HOME",
        "NIGHTMILL_CACHE",
        "NIGHTMILL_CPU_ISA",
        "NIGHTMILL_DEMO_WHEEL",
        "NIGHTMILL_LOG_LEVEL",
        "NIGHTMILL_FAILPOINT",
        "NIGHTMILL_S3_ADDRESSING",  # these three: storage/s3_settings.py
        "NIGHTMILL_S3_CONDITIONAL_WRITES",
        "NIGHTMILL_S3_RETRY_S",
        "NIGHTMILL_BUCKET",
        "NIGHTMILL_QUEUE_TYPE",
        "NIGHTMILL_RING_AFTER_S",
        "NIGHTMILL_TEST_DEVICE",  # read by the kernels' tests only: on which device they run
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the environment decides for every command of this process."""

    home: Path  # NIGHTMILL_HOME: the store and the lock files of running workers
    cache: Path  # NIGHTMILL_CACHE: converted models, compiled kernels; safe to delete
    database_url: str  # DATABASE_URL: sqlite:///… or postgresql://…; default: nightmill.db in home
    cpu_isa: str | None = None  # NIGHTMILL_CPU_ISA: None = the best this machine has
    demo_wheel: Path | None = None  # NIGHTMILL_DEMO_WHEEL: a local copy of the demo model's wheel
    log_level: str = "warning"  # NIGHTMILL_LOG_LEVEL
    broker_url: str | None = None  # CELERY_BROKER_URL: amqp://… (RabbitMQ); None: no fleet, or rings wait in the outbox
    bucket: str | None = None  # NIGHTMILL_BUCKET: of `make up` and docker compose; for scripts, nothing defaults to it
    queue_type: str = "auto"  # NIGHTMILL_QUEUE_TYPE: of queues that do not exist yet; auto = quorum where there is such
    ring_after_s: float = 120.0  # NIGHTMILL_RING_AFTER_S: an unclaimed shard is rung again after this, doubling to 1 h
    failpoint: str = ""  # NIGHTMILL_FAILPOINT: see failpoint.py; tests only

    @property
    def is_embedded(self) -> bool:
        """True: the store is a file of this machine, and only its own processes see it."""
        return self.database_url.startswith("sqlite:")

    @property
    def workers_dir(self) -> Path:
        """Where each running worker of this machine holds its lock file."""
        return self.home / "workers"

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> "Settings":
        """Read and check the environment; an empty variable counts as unset.

        Raises:
            ConfigError: names the variable, and for an unknown one the nearest known.
        """
        environ = os.environ if environ is None else environ
        _refuse_unknown(environ)
        home = _path(environ, "NIGHTMILL_HOME") or _user_home(environ) / ".local/share/nightmill"
        wheel = _path(environ, "NIGHTMILL_DEMO_WHEEL")
        if wheel is not None and not wheel.is_file():
            raise ConfigError(f"NIGHTMILL_DEMO_WHEEL: there is no file {wheel}")
        failpoint = environ.get("NIGHTMILL_FAILPOINT", "")
        parse_failpoints(failpoint)
        return cls(
            home=home,
            cache=_path(environ, "NIGHTMILL_CACHE") or _user_home(environ) / ".cache/nightmill",
            database_url=_database_url(environ.get("DATABASE_URL", ""), home),
            cpu_isa=_choice(environ, "NIGHTMILL_CPU_ISA", CPU_ISAS),
            demo_wheel=wheel,
            log_level=_choice(environ, "NIGHTMILL_LOG_LEVEL", LOG_LEVELS) or "warning",
            broker_url=_broker_url(environ.get("CELERY_BROKER_URL", "")),
            bucket=environ.get("NIGHTMILL_BUCKET") or None,
            queue_type=_choice(environ, "NIGHTMILL_QUEUE_TYPE", QUEUE_TYPES) or "auto",
            ring_after_s=_seconds(environ, "NIGHTMILL_RING_AFTER_S", 120.0),
            failpoint=failpoint,
        )


def _refuse_unknown(environ: Mapping[str, str]) -> None:
    for name in sorted(environ):
        if name.startswith("NIGHTMILL_") and name not in _VARIABLES:
            nearest = difflib.get_close_matches(name, sorted(_VARIABLES), n=1, cutoff=0.0)[0]
            raise ConfigError(f"{name} is not a setting of nightmill; the nearest is {nearest}", hint=f"unset {name}")


def _user_home(environ: Mapping[str, str]) -> Path:
    home = environ.get("HOME")
    if home:
        return Path(home)
    try:
        return Path.home()
    except RuntimeError as error:
        raise ConfigError("HOME is not set, so there is no place for the store", hint="set NIGHTMILL_HOME") from error


def _path(environ: Mapping[str, str], name: str) -> Path | None:
    value = environ.get(name, "")
    if not value:
        return None
    if "\0" in value or "://" in value:
        raise ConfigError(f"{name}: {value!r} is not a local path")
    path = Path(value)
    if value.startswith("~"):
        path = _user_home(environ) / value[1:].lstrip("/") if value in ("~",) or value[1] == "/" else path.expanduser()
    return path.absolute()  # a relative one would name another place after a chdir


def _choice(environ: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str | None:
    value = environ.get(name, "").lower()
    if value and value not in choices:
        raise ConfigError(f"{name}: {environ[name]!r} is not one of {', '.join(choices)}")
    return value or None


def _database_url(value: str, home: Path) -> str:
    if not value:
        return f"sqlite:///{home / 'nightmill.db'}"
    scheme, separator, rest = value.partition("://")
    if scheme == "sqlite" and separator and rest.startswith("/") and len(rest) > 1 and ":memory:" not in rest:
        return value
    if scheme in ("postgres", "postgresql", "postgresql+psycopg") and separator and rest:
        return f"postgresql+psycopg://{rest}"
    # The value may hold a password: name the variable, show only the scheme.
    raise ConfigError(
        f"DATABASE_URL: {scheme if separator else 'this'} is not a store nightmill knows",
        hint="use sqlite:////absolute/path.db or postgresql://user@host/database",
    )


def _broker_url(value: str) -> str | None:
    if not value:
        return None
    scheme, separator, rest = value.partition("://")
    if scheme in ("amqp", "amqps", "pyamqp") and separator and rest:
        return value
    # The value may hold a password, too.
    raise ConfigError(
        f"CELERY_BROKER_URL: {scheme if separator else 'this'} is not a broker nightmill knows",
        hint="use amqp://user:password@host:5672/vhost (RabbitMQ)",
    )


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    value = environ.get(name, "")
    if not value:
        return default
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0.0 < seconds < 1e9:
        raise ConfigError(f"{name}: {value!r} is not a number of seconds above 0")
    return seconds
