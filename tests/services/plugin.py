"""Real services as fixtures: servers per session, a database, virtual host or bucket per test.

    postgres_url        DATABASE_URL of a fresh, empty database      postgres_database()  makes more of them
    rabbitmq            RabbitmqBroker: url of a fresh vhost; server.kill/start/restart/ctl, wipe
    rabbitmq4           the same on RabbitMQ 4.0, for long tests
    rabbitmq_factory    brokers of a test's own, with RabbitmqOptions (short consumer timeouts …)
    moto_s3, ceph_s3    S3Bucket: endpoint, bucket, env              s3_server            the same test on both

A server that a test left dead is started again for the next one. A service that is not installed is a failure in CI,
and elsewhere a skip that says what to run; one that is installed but does not start is always a failure.
"""

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, TypeVar

import pytest
from tests.services.servers import RabbitmqBroker, S3Bucket, Vhosts

from deploy.native import trixie
from deploy.native.ceph import Ceph
from deploy.native.failure import NotInstalledError
from deploy.native.folder import remove, scratch
from deploy.native.moto import Moto
from deploy.native.postgres import Postgres
from deploy.native.rabbitmq import Rabbitmq, RabbitmqOptions

Server = TypeVar("Server", Postgres, Rabbitmq, Moto, Ceph)
_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def services_dir() -> Iterator[Path]:
    """One folder for all servers of this session, reachable for their users (pytest's own is closed to them)."""
    folder = scratch("nightmill-services")
    yield folder
    remove(folder)


@pytest.fixture(scope="session")
def postgres_server(services_dir: Path) -> Iterator[Postgres]:
    """The session's PostgreSQL; a test that kills it need not start it again."""
    server = _started(Postgres(services_dir / "postgres"))
    yield server
    server.stop()


@pytest.fixture
def postgres_database(postgres_server: Postgres) -> Iterator[Callable[[], str]]:
    """A function that makes a fresh, empty database and returns its URL; they are dropped after the test."""
    made: list[str] = []

    def make() -> str:
        made.append(f"test_{next(_numbers)}")
        return postgres_server.create_database(made[-1])

    if not postgres_server.running:
        postgres_server.start()
    yield make
    if not postgres_server.running:
        postgres_server.start()
    for name in made:
        postgres_server.drop_database(name)


@pytest.fixture
def postgres_url(postgres_database: Callable[[], str]) -> str:
    """DATABASE_URL of a fresh, empty database."""
    return postgres_database()


@pytest.fixture(scope="session")
def rabbitmq_server(services_dir: Path) -> Iterator[Rabbitmq]:
    """The session's RabbitMQ with its own defaults."""
    server = _started(Rabbitmq(services_dir / "rabbitmq"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def rabbitmq_vhosts(rabbitmq_server: Rabbitmq) -> Vhosts:
    """The session's supply of virtual hosts."""
    return Vhosts(rabbitmq_server)


@pytest.fixture
def rabbitmq(rabbitmq_server: Rabbitmq, rabbitmq_vhosts: Vhosts) -> RabbitmqBroker:
    """A real broker with a virtual host of this test's own."""
    return _broker(rabbitmq_server, rabbitmq_vhosts)


@pytest.fixture
def rabbitmq_factory(services_dir: Path) -> Iterator[Callable[[RabbitmqOptions], Rabbitmq]]:
    """A function that starts a broker with options of the test's own (about 5 s each)."""
    started: list[Rabbitmq] = []

    def start(options: RabbitmqOptions) -> Rabbitmq:
        started.append(_started(Rabbitmq(services_dir / f"rabbitmq-{next(_numbers)}", options=options)))
        return started[-1]

    yield start
    for server in started:
        server.stop()
        remove(server.folder)


@pytest.fixture(scope="session")
def rabbitmq4_server() -> Iterator[Rabbitmq]:
    """The session's RabbitMQ 4.0, for long tests: its packages take a minute to fetch, once for a machine."""
    name = f"rabbitmq4-{os.getpid()}"
    try:
        chroot = trixie.tree(lambda line: None)
    except NotInstalledError as error:
        _missing(error)
    server = _started(Rabbitmq(trixie.folder(name), chroot=chroot))
    yield server
    server.stop()
    remove(server.folder)


@pytest.fixture(scope="session")
def rabbitmq4_vhosts(rabbitmq4_server: Rabbitmq) -> Vhosts:
    """Its supply of virtual hosts."""
    return Vhosts(rabbitmq4_server)


@pytest.fixture
def rabbitmq4(rabbitmq4_server: Rabbitmq, rabbitmq4_vhosts: Vhosts) -> RabbitmqBroker:
    """As `rabbitmq`, on 4.0. Mark its tests `long`."""
    return _broker(rabbitmq4_server, rabbitmq4_vhosts)


@pytest.fixture(scope="session")
def moto_server(services_dir: Path) -> Iterator[Moto]:
    """The session's moto."""
    server = _started(Moto(services_dir / "moto"))
    yield server
    server.stop()


@pytest.fixture
def moto_s3(moto_server: Moto) -> Iterator[S3Bucket]:
    """A fresh bucket on moto."""
    yield from _bucket("moto", moto_server)


@pytest.fixture(scope="session")
def ceph_server(services_dir: Path) -> Iterator[Ceph]:
    """The session's Ceph (about 15 s)."""
    server = _started(Ceph(services_dir / "ceph"))
    yield server
    server.stop()


@pytest.fixture
def ceph_s3(ceph_server: Ceph) -> Iterator[S3Bucket]:
    """A fresh bucket on Ceph's S3 gateway."""
    yield from _bucket("ceph", ceph_server)


@pytest.fixture(params=["moto", "ceph"])
def s3_server(request: pytest.FixtureRequest) -> S3Bucket:
    """A fresh bucket on each kind of server: the test runs twice."""
    bucket = request.getfixturevalue(f"{request.param}_s3")
    assert isinstance(bucket, S3Bucket)
    return bucket


def _broker(server: Rabbitmq, vhosts: Vhosts) -> RabbitmqBroker:
    if not server.running:
        server.start()
    vhost = vhosts.take()
    return RabbitmqBroker(server.url(vhost), vhost, server, vhosts)


def _bucket(kind: str, server: Moto | Ceph) -> Iterator[S3Bucket]:
    if not server.running:
        server.start()
    bucket = S3Bucket(kind, server.endpoint, f"nightmill-test-{next(_numbers)}")
    bucket.endpoint.create_bucket(bucket.bucket)
    yield bucket
    if server.running:
        bucket.endpoint.delete_bucket(bucket.bucket)


def _started(server: Server) -> Server:
    try:
        server.start()
    except NotInstalledError as error:
        _missing(error)
    except BaseException:
        server.stop()
        raise
    return server


def _missing(error: NotInstalledError) -> NoReturn:
    if os.environ.get("CI") == "true":
        pytest.fail(str(error))
    pytest.skip(str(error))
