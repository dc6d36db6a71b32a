from pathlib import Path

import pytest

from nightmill.config import Settings
from nightmill.errors import ConfigError, ExitCode

HOME = {"HOME": "/home/u"}


def test_defaults() -> None:
    settings = Settings.from_env(HOME)
    assert settings.home == Path("/home/u/.local/share/nightmill")
    assert settings.cache == Path("/home/u/.cache/nightmill")
    assert settings.database_url == "sqlite:////home/u/.local/share/nightmill/nightmill.db"
    assert settings.workers_dir == settings.home / "workers"
    assert (settings.cpu_isa, settings.demo_wheel, settings.log_level, settings.failpoint) == (
        None,
        None,
        "warning",
        "",
    )


def test_everything_set(tmp_path: Path) -> None:
    wheel = tmp_path / "demo.whl"
    wheel.touch()
    settings = Settings.from_env(
        HOME
        | {
            "NIGHTMILL_HOME": "~/mill",
            "NIGHTMILL_CACHE": "/cache",
            "DATABASE_URL": "postgres://u:p@h/db",
            "NIGHTMILL_CPU_ISA": "AVX2",
            "NIGHTMILL_DEMO_WHEEL": str(wheel),
            "NIGHTMILL_LOG_LEVEL": "debug",
            "NIGHTMILL_FAILPOINT": "after_claim:2",
        }
    )
    assert settings == Settings(
        home=Path("/home/u/mill"),
        cache=Path("/cache"),
        database_url="postgresql+psycopg://u:p@h/db",
        cpu_isa="avx2",
        demo_wheel=wheel,
        log_level="debug",
        failpoint="after_claim:2",
    )


def test_home_moves_the_database() -> None:
    assert Settings.from_env(HOME | {"NIGHTMILL_HOME": "/data"}).database_url == "sqlite:////data/nightmill.db"


def test_a_relative_home_means_the_folder_of_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Settings.from_env(HOME | {"NIGHTMILL_HOME": "mill"}).home == tmp_path / "mill"


def test_empty_is_unset() -> None:
    empty = {"NIGHTMILL_HOME": "", "DATABASE_URL": "", "NIGHTMILL_CPU_ISA": "", "NIGHTMILL_LOG_LEVEL": ""}
    assert Settings.from_env(HOME | empty) == Settings.from_env(HOME)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("NIGHTMILL_CPU_ISA", "sse9"),
        ("NIGHTMILL_LOG_LEVEL", "loud"),
        ("NIGHTMILL_FAILPOINT", "nowhere"),
        ("NIGHTMILL_DEMO_WHEEL", "/no/such.whl"),
        ("NIGHTMILL_HOME", "s3://bucket/x"),
        ("NIGHTMILL_QUEUE_TYPE", "stream"),
        ("NIGHTMILL_RING_AFTER_S", "0"),
        ("NIGHTMILL_RING_AFTER_S", "soon"),
        ("CELERY_BROKER_URL", "redis://u:secret@h"),
        ("CELERY_BROKER_URL", "amqp"),
        ("DATABASE_URL", "mysql://u:secret@h/db"),
        ("DATABASE_URL", "sqlite://"),
        ("DATABASE_URL", "sqlite:///:memory:"),
        ("DATABASE_URL", "sqlite:relative.db"),
        ("DATABASE_URL", "nonsense"),
    ],
)
def test_a_bad_value_names_its_variable(variable: str, value: str) -> None:
    with pytest.raises(ConfigError, match=variable) as caught:
        Settings.from_env(HOME | {variable: value})
    assert caught.value.exit_code == ExitCode.USAGE
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("NIGHTMILL_HOMES", "NIGHTMILL_HOME"),
        ("NIGHTMILL_LOGLEVEL", "NIGHTMILL_LOG_LEVEL"),
        ("NIGHTMILL_X", "NIGHTMILL_"),
    ],
)
def test_an_unknown_variable_is_refused_with_the_nearest(typo: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"{typo} .*{meant}"):
        Settings.from_env(HOME | {typo: "1"})


def test_variables_of_others_are_none_of_our_business() -> None:
    Settings.from_env(HOME | {"NIGHT": "1", "HF_HOME": "/x", "nightmill_home": "/y"})


def test_the_broker_and_how_it_is_rung() -> None:
    defaults = Settings.from_env(HOME)
    assert (defaults.broker_url, defaults.queue_type, defaults.ring_after_s) == (None, "auto", 120.0)
    url = "amqp://u:p@h:5672/vhost"
    changed = Settings.from_env(
        HOME | {"CELERY_BROKER_URL": url, "NIGHTMILL_QUEUE_TYPE": "classic", "NIGHTMILL_RING_AFTER_S": "2.5"}
    )
    assert (changed.broker_url, changed.queue_type, changed.ring_after_s) == (url, "classic", 2.5)
