"""What the service fixtures hand to a test."""

import itertools
from dataclasses import dataclass, field

from deploy.native.rabbitmq import Rabbitmq
from deploy.native.s3 import S3Endpoint


@dataclass(slots=True)
class Vhosts:
    """Fresh virtual hosts, made a handful at a time: each rabbitmqctl costs a second, a vhost a few milliseconds."""

    server: Rabbitmq
    _fresh: list[str] = field(default_factory=list)
    _used: list[str] = field(default_factory=list)
    _names: "itertools.count[int]" = field(default_factory=itertools.count)

    def take(self) -> str:
        """The name of a virtual host that nobody has used."""
        if not self._fresh:
            self._fresh = [f"test-{next(self._names)}" for _ in range(6)]
            self.server.replace_vhosts(delete=self._used, create=self._fresh)
            self._used = []
        name = self._fresh.pop(0)
        self._used.append(name)
        return name

    def recreate(self, name: str) -> None:
        """After a wipe: all are gone; make `name` again."""
        self._fresh, self._used = [], [name]
        self.server.replace_vhosts(create=[name])


@dataclass(frozen=True, slots=True)
class RabbitmqBroker:
    """A real broker with a virtual host for one test. `server` has kill, start, stop, restart and ctl."""

    url: str
    vhost: str
    server: Rabbitmq
    _vhosts: Vhosts

    def wipe(self) -> None:
        """Kill the broker, lose all it kept, start it again with this test's virtual host, empty."""
        self.server.wipe()
        self.server.start()
        self._vhosts.recreate(self.vhost)


@dataclass(frozen=True, slots=True)
class S3Bucket:
    """A fresh bucket on an S3 server."""

    kind: str  # moto or ceph
    endpoint: S3Endpoint
    bucket: str

    @property
    def env(self) -> dict[str, str]:
        """The environment variables by which nightmill, boto3 and others find it."""
        return self.endpoint.env(self.bucket)
