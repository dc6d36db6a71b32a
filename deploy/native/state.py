"""The folder of `make up`: which processes run, at which ports, and the variables by which to reach them."""

import contextlib
import fcntl
import hashlib
import json
import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from deploy.native.failure import ServiceError
from deploy.native.folder import closed_parent
from deploy.native.ports import free_port
from deploy.native.record import ProcessRecord


class State:
    """`.nightmill/` of a checkout. `lock` before changing anything."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.env_file = self.folder / "env"
        self._processes = self.folder / "processes.json"
        self._ports = self.folder / "ports.json"

    @property
    def data(self) -> Path:
        """Where the services keep their data: here, or in /var/tmp when their users cannot come here."""
        if os.geteuid() == 0 and closed_parent(self.folder / "data"):
            return Path("/var/tmp") / f"nightmill-{hashlib.sha256(str(self.folder).encode()).hexdigest()[:12]}"
        return self.folder / "data"

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """One `up` or `down` at a time.

        Raises:
            ServiceError: another one is at work.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ServiceError(f"another `make up` or `make down` is at work in {self.folder}") from error
            yield

    def port(self, name: str) -> int:
        """The port of a service: the same each time, since brokers and object stores keep it in their data."""
        ports: dict[str, int] = json.loads(self._ports.read_text()) if self._ports.exists() else {}
        if name not in ports:
            ports[name] = next(port for port in iter(free_port, None) if port not in ports.values())
            _write(self._ports, json.dumps(ports, indent=1) + "\n")
        return ports[name]

    def read(self) -> list[ProcessRecord]:
        """The processes that were started, in the order of their start."""
        if not self._processes.exists():
            return []
        return [ProcessRecord.from_json(value) for value in json.loads(self._processes.read_text())]

    def write(self, records: list[ProcessRecord]) -> None:
        """Replace the list; an empty one removes it."""
        if records:
            _write(self._processes, json.dumps([record.to_json() for record in records], indent=1) + "\n")
        else:
            self._processes.unlink(missing_ok=True)

    def write_env(self, variables: Mapping[str, str]) -> None:
        """KEY=VALUE lines for `set -a; . FILE`. Only its owner may read it: it holds a key."""
        _write(self.env_file, "".join(f"{key}={shlex.quote(value)}\n" for key, value in variables.items()))

    def remove_env(self) -> None:
        """What it names is gone."""
        self.env_file.unlink(missing_ok=True)


def _write(path: Path, text: str) -> None:
    draft = path.with_suffix(".draft")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    draft.replace(path)
