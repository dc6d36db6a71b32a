"""RabbitMQ with a node, a name daemon, ports and folders of its own; several can run on one machine."""

import os
import secrets
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import amqp

from deploy.native.failure import NotInstalledError, ServiceError
from deploy.native.folder import prepare, remove
from deploy.native.ports import accepts, free_port
from deploy.native.process import Command, Process, run_as

_USER = "rabbitmq"
_LIBRARY = Path("/usr/lib/rabbitmq/lib")
# No spinning schedulers (they eat the cores the workers need), two of them whatever the machine.
_ERLANG = "+S 2:2 +sbwt none +sbwtdcpu none +sbwtdio none -kernel inet_dist_use_interface {127,0,0,1}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RabbitmqOptions:
    """What a test may want different from RabbitMQ's own defaults."""

    consumer_timeout_ms: int | None = None  # default of RabbitMQ: 30 minutes
    channel_tick_ms: int | None = None  # how often consumer timeouts are looked for; default of RabbitMQ: 1 minute
    extra_conf: Sequence[str] = ()  # lines of rabbitmq.conf


class Rabbitmq:
    """One node. `guest`/`guest` may log in from this machine; management plugin and statistics are off.

    The server script of the library is started, not the one in /usr/sbin: that one insists on the system's folders,
    and on changing the user. RUNNING_UNDER_SYSTEMD makes the script *become* the Erlang VM: one pid to signal.
    """

    def __init__(
        self,
        folder: Path,
        *,
        port: int | None = None,
        options: RabbitmqOptions = RabbitmqOptions(),
        outlive: bool = False,
        chroot: Path | None = None,
    ) -> None:
        self.folder = folder.absolute()
        self.port = port or free_port()
        self.options = options
        self._chroot = chroot
        self._dist_port, self._epmd_port = free_port(), free_port()
        self.node = f"n{self.port}@localhost"
        orphan_signal = None if outlive else signal.SIGKILL
        self._epmd = self._make_process(
            "epmd", ["epmd", "-port", str(self._epmd_port), "-address", "127.0.0.1"], orphan_signal
        )
        self._server: Process | None = None
        self._orphan_signal = orphan_signal

    @property
    def processes(self) -> list[Process]:
        """Server and name daemon, in the order in which they are to be stopped."""
        return [*([self._server] if self._server else []), self._epmd]

    @property
    def running(self) -> bool:
        """Whether the server's process is there."""
        return self._server is not None and self._server.running

    def url(self, vhost: str = "/") -> str:
        """CELERY_BROKER_URL of one of its virtual hosts."""
        return f"amqp://guest:guest@127.0.0.1:{self.port}/{quote(vhost, safe='')}"

    def start(self) -> "Rabbitmq":
        """Start it; returns when a client can log in (about 5 s, a few more on a new folder)."""
        script = self._script("rabbitmq-server")
        self._configure()
        if not self._epmd.running:
            self._epmd.start()
            self._epmd.wait_until(lambda: accepts(self._epmd_port), timeout_s=20)
        self._server = self._make_process("rabbitmq", [str(script)], self._orphan_signal)
        self._server.start()
        self._server.wait_until(self._answers, timeout_s=120)
        return self

    def stop(self) -> None:
        """Shut the node down in order, then its name daemon."""
        for process in self.processes:
            process.stop(grace_s=60)

    def kill(self) -> None:
        """A crash: SIGKILL. Durable queues and persistent, confirmed messages are there after the next start."""
        if self._server is not None:
            self._server.kill()

    def restart(self) -> None:
        """Stop the node in order (if it runs) and start it again with what it kept."""
        if self._server is not None:
            self._server.stop(grace_s=60)
        self.start()

    def wipe(self) -> None:
        """Kill it and lose everything: vhosts, queues, messages. The next start is that of a new node."""
        self.kill()
        remove(self.folder / "mnesia")

    def ctl(self, *arguments: str, timeout_s: float = 60.0) -> str:
        """`rabbitmqctl ARGUMENTS` (about 1 s each: it starts an Erlang VM); returns what it printed."""
        command = self._command(
            "rabbitmqctl", [str(self._script("rabbitmqctl")), "--silent", "-n", self.node, *arguments]
        )
        done = run_as(command, timeout_s=timeout_s)
        if done.returncode:
            raise ServiceError(f"rabbitmqctl {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
        return done.stdout

    def replace_vhosts(self, *, delete: Sequence[str] = (), create: Sequence[str]) -> None:
        """Delete some virtual hosts (with their queues and connections) and create others, all with one rabbitmqctl."""
        self.ctl("eval", _erlang_vhosts(delete, create))

    def _script(self, name: str) -> Path:
        library = self._inside(_LIBRARY)
        homes = sorted(library.glob("rabbitmq_server-*"))
        if not homes:
            raise NotInstalledError(f"RabbitMQ (in {library})")
        return _LIBRARY / homes[-1].name / "sbin" / name

    def _inside(self, path: Path) -> Path:
        """Where `path` of the server's file tree is in ours."""
        return path if self._chroot is None else self._chroot / path.relative_to("/")

    def _answers(self) -> bool:
        connection = amqp.Connection(f"127.0.0.1:{self.port}", connect_timeout=5, read_timeout=5, write_timeout=5)
        try:
            connection.connect()
        except (OSError, amqp.exceptions.AMQPError):
            connection.collect()
            return False
        connection.close()
        return True

    def _make_process(self, name: str, argv: Sequence[str], orphan_signal: signal.Signals | None) -> Process:
        return Process(self._command(name, argv, orphan_signal))

    def _command(
        self, name: str, argv: Sequence[str], orphan_signal: signal.Signals | None = signal.SIGKILL
    ) -> Command:
        return Command(
            name=name,
            argv=argv,
            env=self._environment(),
            cwd=self.folder,
            log=self.folder / f"{name}.log",
            user=_USER,
            chroot=self._chroot,
            orphan_signal=orphan_signal,
        )

    def _configure(self) -> None:
        prepare(self.folder, None)
        for name in ("mnesia", "log", "gen"):
            (self.folder / name).mkdir(exist_ok=True)
        lines = [
            f"listeners.tcp.default = 127.0.0.1:{self.port}",
            "vm_memory_high_watermark.absolute = 1GB",
            "disk_free_limit.absolute = 100MB",
            "log.file.level = info",
            *self.options.extra_conf,
        ]
        (self.folder / "rabbitmq.conf").write_text("\n".join([*lines, ""]))
        (self.folder / "advanced.config").write_text(_advanced(self.options))
        (self.folder / "enabled_plugins").write_text("[].\n")
        cookie = self.folder / ".erlang.cookie"
        if not cookie.exists():
            cookie.write_text(secrets.token_hex(16))
            cookie.chmod(0o400)
        prepare(self.folder, _USER)

    def _environment(self) -> dict[str, str]:
        root = self.folder if self._chroot is None else Path("/") / self.folder.relative_to(self._chroot)
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("RABBITMQ_", "ERL_"))}
        return inherited | {
            "HOME": str(root),
            "LANG": "C.UTF-8",
            "LC_ALL": "C.UTF-8",
            "RUNNING_UNDER_SYSTEMD": "true",
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": self.node,
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self._dist_port),
            "RABBITMQ_MNESIA_BASE": str(root / "mnesia"),
            "RABBITMQ_LOG_BASE": str(root / "log"),
            "RABBITMQ_LOGS": "-",  # to the log of the process, where an error message can quote it
            "RABBITMQ_GENERATED_CONFIG_DIR": str(root / "gen"),
            "RABBITMQ_CONFIG_FILE": str(root / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(root / "advanced.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(root / "enabled_plugins"),
            "RABBITMQ_PID_FILE": str(root / "rabbitmq.pid"),
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": _ERLANG,
            "RABBITMQ_CTL_ERL_ARGS": "+S 1:1 +sbwt none",
        }


def _advanced(options: RabbitmqOptions) -> str:
    """The settings that rabbitmq.conf has no word for (3.10: both)."""
    settings = {"consumer_timeout": options.consumer_timeout_ms, "channel_tick_interval": options.channel_tick_ms}
    terms = ", ".join(f"{{{key}, {value}}}" for key, value in settings.items() if value is not None)
    return f"[{{rabbit, [{terms}]}}].\n"


def _erlang_vhosts(delete: Sequence[str], create: Sequence[str]) -> str:
    for name in (*delete, *create):
        if not name.replace("-", "").isalnum():
            raise ServiceError(f"{name!r} is no name for a virtual host of a test: letters, digits and - only")
    away, new = (", ".join(f'<<"{name}">>' for name in names) for names in (delete, create))
    grant = 'rabbit_auth_backend_internal:set_permissions(<<"guest">>, V, <<".*">>, <<".*">>, <<".*">>, <<"native">>)'
    return (
        f'[rabbit_vhost:delete(V, <<"native">>) || V <- [{away}]], '
        f'[begin ok = rabbit_vhost:add(V, <<"native">>), ok = {grant} end || V <- [{new}]].'
    )
