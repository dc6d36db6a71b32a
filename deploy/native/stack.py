"""The whole system on one machine: PostgreSQL, RabbitMQ, an S3 server, the schema, workers."""

import json
import os
import shutil
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deploy.native.ceph import Ceph
from deploy.native.examples import put_examples
from deploy.native.failure import ServiceError, log_tail
from deploy.native.folder import prepare
from deploy.native.moto import Moto
from deploy.native.packages import CEPH, missing
from deploy.native.postgres import Postgres
from deploy.native.process import Command, Process
from deploy.native.rabbitmq import Rabbitmq
from deploy.native.record import ProcessRecord
from deploy.native.state import State

BUCKET = "nightmill"
SERVICE_GRACE_S = 30.0
WORKER_GRACE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOptions:
    """What `make up` may be told."""

    workers: int = 2
    model: str = "demo"  # is fetched and converted before the workers start; empty: none is
    s3: str = "auto"  # ceph, moto, or auto: Ceph where it is installed
    fake_engine: str | None = None  # a script for workers without a model; for tests
    worker_flags: tuple[str, ...] = ()  # more words for `nightmill worker`


class Stack:
    """Starts the parts in order. Each process is written down in the state before the next one starts."""

    def __init__(self, state: State, options: StackOptions, say: Callable[[str], None]) -> None:
        self._state = state
        self._options = options
        self._say = say
        self._records: list[ProcessRecord] = []
        self.env: dict[str, str] = {}

    def start(self) -> None:
        """Start everything; returns when all is ready. What was started stays when this raises: the caller ends it.

        Raises:
            ServiceError: a part did not become ready; the text shows the end of its log.
        """
        prepare(self._state.data, None)
        self._state.data.chmod(0o755)
        self._start_postgres()
        self._start_rabbitmq()
        self._start_s3()
        self._run("migrate", ["migrate"], "the database has the newest schema", timeout_s=120)
        if self._options.model and self._options.fake_engine is None:
            self._fetch_model()
        self._start_workers()
        self._state.write_env(self.env)

    def _start_postgres(self) -> None:
        server = Postgres(self._state.data / "postgres", port=self._state.port("postgres"), durable=True, outlive=True)
        self._up("PostgreSQL", server)
        if "nightmill" not in server.databases():
            server.create_database("nightmill")
        # Without the driver, so that psql and others take it, too.
        self.env["DATABASE_URL"] = server.url("nightmill").replace("+psycopg", "")

    def _start_rabbitmq(self) -> None:
        server = Rabbitmq(self._state.data / "rabbitmq", port=self._state.port("rabbitmq"), outlive=True)
        self._up("RabbitMQ", server)
        self.env["CELERY_BROKER_URL"] = server.url()

    def _start_s3(self) -> None:
        kind = self._options.s3
        if kind == "auto":
            kind = "moto" if missing(CEPH) else "ceph"
        server: Ceph | Moto
        if kind == "ceph":
            ports = {"port": self._state.port("ceph"), "mon_port": self._state.port("ceph-mon")}
            server = Ceph(self._state.data / "ceph", outlive=True, **ports)
        else:
            server = Moto(self._state.data / "moto", port=self._state.port("moto"), outlive=True)
            self._say("S3 is moto: it keeps everything in memory, and `make down` loses it")
        self._up(f"S3 ({kind})", server)
        server.endpoint.create_bucket(BUCKET)
        put_examples(server.endpoint, BUCKET)
        self.env |= server.endpoint.env(BUCKET)

    def _up(self, name: str, server: Postgres | Rabbitmq | Ceph | Moto) -> None:
        began = time.monotonic()
        self._say(f"starting {name}")
        try:
            server.start()
        finally:
            self._note([process for process in reversed(server.processes) if process.running], SERVICE_GRACE_S)
        self._say(f"{name} is ready at port {server.port} ({time.monotonic() - began:.1f} s)")

    def _note(self, processes: list[Process], grace_s: float) -> None:
        self._records += [ProcessRecord.of(process, grace_s=grace_s) for process in processes]
        self._state.write(self._records)

    def _fetch_model(self) -> None:
        model = self._options.model
        self._say(f"fetching model {model} (once; MODEL= skips it)")
        program = (
            "import sys; from nightmill.records import ModelSpec; "
            "from nightmill_worker.model.source import resolve_model; "
            "resolve_model(ModelSpec(model=sys.argv[1]), progress=lambda line: print(line, flush=True))"
        )
        self._finish("model", [sys.executable, "-c", program, model], timeout_s=1800)

    def _run(self, name: str, words: list[str], then: str, *, timeout_s: float) -> None:
        self._finish(name, [_nightmill(), *words], timeout_s=timeout_s)
        self._say(then)

    def _finish(self, name: str, argv: list[str], *, timeout_s: float) -> None:
        process = Process(self._command(name, argv, outlive=False))
        process.start()
        if process.wait(timeout_s=timeout_s):
            raise ServiceError(f"{' '.join(argv[:3])} failed; {log_tail(process.command.log)}")

    def _start_workers(self) -> None:
        ports = [self._state.port(f"worker-{number}") for number in range(1, self._options.workers + 1)]
        workers = [Process(self._command(f"worker-{i}", self._worker(port))) for i, port in enumerate(ports, 1)]
        self._say(f"starting {len(workers)} workers")
        for worker in workers:
            worker.start()
            self._note([worker], WORKER_GRACE_S + 15)
        for worker, port in zip(workers, ports, strict=True):
            worker.wait_until(lambda port=port: _is_healthy(port), timeout_s=300)  # type: ignore[misc]
            self._say(f"{worker.command.name} is ready; metrics: http://127.0.0.1:{port}/metrics")

    def _worker(self, port: int) -> list[str]:
        words = [_nightmill(), "worker", "--metrics-port", str(port), "--grace", f"{WORKER_GRACE_S:.0f}"]
        if self._options.fake_engine is not None:
            words += ["--fake-engine", self._options.fake_engine]
        else:
            threads = max(1, len(os.sched_getaffinity(0)) // max(1, self._options.workers))
            words += ["--num-threads", str(threads)]
        return [*words, *self._options.worker_flags]

    def _command(self, name: str, argv: list[str], *, outlive: bool = True) -> Command:
        logs = self._state.folder / "logs"
        logs.mkdir(exist_ok=True)
        environment = {key: value for key, value in os.environ.items() if not key.startswith("AWS_")}
        home = {"NIGHTMILL_HOME": str(self._state.folder / "home"), "NIGHTMILL_LOG_LEVEL": "info"}
        return Command(
            name=name,
            argv=argv,
            env=environment | home | self.env,
            cwd=self._state.folder,
            log=logs / f"{name}.log",
            orphan_signal=None if outlive else signal.SIGKILL,
        )


def _nightmill() -> str:
    """The command of the environment that runs us."""
    beside = Path(sys.executable).with_name("nightmill")
    found = str(beside) if beside.exists() else shutil.which("nightmill")
    if found is None:
        raise ServiceError("there is no `nightmill` command beside this Python", hint="run: make setup")
    return found


def _is_healthy(port: int) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}/healthz", timeout=5) as answer:
            return bool(json.load(answer)["status"] == "ok")
    except (OSError, ValueError, KeyError):
        return False
