"""PostgreSQL 15 on a port and in a folder of its own."""

import os
import signal
from pathlib import Path
from urllib.parse import quote

import psycopg
from psycopg import sql

from deploy.native.failure import NotInstalledError, ServiceError, log_tail
from deploy.native.folder import prepare
from deploy.native.ports import free_port
from deploy.native.process import Command, Process

BINARIES = Path("/usr/lib/postgresql/15/bin")
_USER = "postgres"  # PostgreSQL refuses to run as root


class Postgres:
    """One server; the only role is `postgres`, without a password, reachable from this machine alone.

    Args:
        folder: holds data, socket and log; made when it is not there.
        durable: fsync. Off, a killed server still loses nothing, only a machine that loses power does.
        outlive: keep running when the process that started it ends.
    """

    def __init__(
        self,
        folder: Path,
        *,
        port: int | None = None,
        durable: bool = False,
        outlive: bool = False,
        extra: tuple[str, ...] = (),
    ) -> None:
        self.folder = folder.absolute()
        self.port = port or free_port()
        settings = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",  # a socket's path may be 107 bytes long at most, a folder's may be longer
            "shared_buffers": "64MB",
            "max_connections": "200",
            "fsync": "on" if durable else "off",
        }
        self._process = Process(
            Command(
                name="postgres",
                argv=[
                    *(str(BINARIES / "postgres"), "-D", str(self.folder / "data"), "-p", str(self.port)),
                    *(word for key, value in settings.items() for word in ("-c", f"{key}={value}")),
                    *extra,
                ],
                env=_environment(),
                cwd=self.folder,
                log=self.folder / "postgres.log",
                user=_USER,
                stop_signal=signal.SIGINT,  # "fast": clients are cut off; SIGTERM would wait for them
                orphan_signal=None if outlive else signal.SIGQUIT,
            )
        )

    @property
    def processes(self) -> list[Process]:
        """The postmaster."""
        return [self._process]

    @property
    def running(self) -> bool:
        """Whether the server's process is there."""
        return self._process.running

    def url(self, database: str = "postgres") -> str:
        """DATABASE_URL of one of its databases."""
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/{quote(database, safe='')}"

    def start(self) -> "Postgres":
        """Start it, on an empty folder after initdb; returns when it answers a query (about 1 s)."""
        if not BINARIES.is_dir():
            raise NotInstalledError("PostgreSQL 15")
        prepare(self.folder, _USER)
        if not (self.folder / "data/PG_VERSION").exists():
            self._initdb()
        self._process.start()
        self._process.wait_until(self._answers, timeout_s=60)
        return self

    def stop(self) -> None:
        """Fast shutdown: open transactions are rolled back, data is flushed."""
        self._process.stop()

    def kill(self) -> None:
        """A crash: SIGQUIT ends every backend at once without a checkpoint; the next start recovers from the WAL."""
        self._process.signal(signal.SIGQUIT)
        self._process.stop(grace_s=20)

    def restart(self) -> None:
        """Stop (if it runs) and start again at the same port with the same data."""
        self.stop()
        self.start()

    def databases(self) -> set[str]:
        """The names of its databases."""
        with self._connect() as connection:
            return {str(name) for (name,) in connection.execute("SELECT datname FROM pg_database").fetchall()}

    def create_database(self, name: str) -> str:
        """A new empty database; returns its URL."""
        with self._connect() as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        return self.url(name)

    def drop_database(self, name: str) -> None:
        """Drop a database, cutting off whoever is connected to it."""
        with self._connect() as connection:
            connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def _connect(self) -> "psycopg.Connection[tuple[object, ...]]":
        return psycopg.connect(
            host="127.0.0.1", port=self.port, user="postgres", dbname="postgres", autocommit=True, connect_timeout=5
        )

    def _answers(self) -> bool:
        try:
            with self._connect() as connection:
                connection.execute("SELECT 1")
        except psycopg.Error:
            return False
        return True

    def _initdb(self) -> None:
        log = self.folder / "initdb.log"
        initdb = Process(
            Command(
                name="initdb",
                argv=[
                    *(str(BINARIES / "initdb"), "-D", str(self.folder / "data"), "-U", "postgres", "-A", "trust", "-N"),
                    *("-E", "UTF8", "--locale=C.UTF-8", "--no-instructions"),
                ],
                env=_environment(),
                cwd=self.folder,
                log=log,
                user=_USER,
            )
        )
        initdb.start()
        if initdb.wait(timeout_s=60):
            raise ServiceError(f"initdb failed; {log_tail(log)}")


def _environment() -> dict[str, str]:
    """PG* variables of the caller must not reach the server."""
    return {key: value for key, value in os.environ.items() if not key.startswith("PG")}
