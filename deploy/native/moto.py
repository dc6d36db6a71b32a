"""moto as an S3 server: up in seconds, with S3's conditional requests; checks no key and keeps all in memory."""

import signal
import sys
import urllib.error
import urllib.request
from pathlib import Path

from deploy.native.folder import prepare
from deploy.native.ports import free_port
from deploy.native.process import Command, Process
from deploy.native.s3 import S3Endpoint, local_environment


class Moto:
    """One server. What is stored is lost when it stops, so `kill` and `restart` are those of an empty store."""

    def __init__(self, folder: Path, *, port: int | None = None, outlive: bool = False) -> None:
        self.folder = folder.absolute()
        self.port = port or free_port()
        self.endpoint = S3Endpoint(url=f"http://127.0.0.1:{self.port}", access_key="nightmill", secret_key="nightmill")
        self._process = Process(
            Command(
                name="moto",
                argv=[sys.executable, "-c", _SERVE, str(self.port)],
                env=local_environment() | {"PYTHONUNBUFFERED": "1"},
                cwd=self.folder,
                log=self.folder / "moto.log",
                orphan_signal=None if outlive else signal.SIGKILL,
            )
        )

    @property
    def processes(self) -> list[Process]:
        """The one process."""
        return [self._process]

    @property
    def running(self) -> bool:
        """Whether the server's process is there."""
        return self._process.running

    def start(self) -> "Moto":
        """Start it; returns when it answers (2 to 4 s)."""
        prepare(self.folder, None)
        self._process.start()
        self._process.wait_until(self._answers, timeout_s=60)
        return self

    def stop(self) -> None:
        """End it; what it stored is gone."""
        self._process.stop(grace_s=5)

    def kill(self) -> None:
        """SIGKILL; what it stored is gone."""
        self._process.kill()

    def restart(self) -> None:
        """Stop it and start an empty one at the same port."""
        self.stop()
        self.start()

    def _answers(self) -> bool:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"{self.endpoint.url}/moto-api/data.json", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


# As `moto_server` does it, but without a log line per request.
_SERVE = """
import logging, sys
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import run_simple

logging.getLogger("werkzeug").setLevel(logging.WARNING)
application = DomainDispatcherApplication(create_backend_app)
run_simple("127.0.0.1", int(sys.argv[1]), application, threaded=True, request_handler=MotoRequestHandler)
"""
