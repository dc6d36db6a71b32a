"""The fixtures themselves: fresh per test, alive after a test that killed something."""

import os
import select
import subprocess
import sys
from pathlib import Path

import kombu
import psycopg
import pytest
from botocore.exceptions import ClientError
from tests.services.servers import RabbitmqBroker, S3Bucket

from deploy.native.ceph import Ceph
from deploy.native.failure import ServiceError
from deploy.native.postgres import Postgres
from deploy.native.rabbitmq import Rabbitmq


def _dsn(url: str) -> str:
    return url.replace("postgresql+psycopg://", "postgresql://")


@pytest.mark.parametrize("time", [1, 2])
def test_each_test_gets_an_empty_database(postgres_url: str, time: int) -> None:
    with psycopg.connect(_dsn(postgres_url)) as connection:
        assert connection.execute("SHOW server_version_num").fetchone()[0].startswith("15")  # type: ignore[index]
        assert connection.execute("SHOW server_encoding").fetchone() == ("UTF8",)
        connection.execute("CREATE TABLE here (n int)")  # fails the second time if the database is the same


def test_postgres_keeps_what_was_committed_through_a_crash(postgres_url: str, postgres_server: Postgres) -> None:
    with psycopg.connect(_dsn(postgres_url)) as connection:
        connection.execute("CREATE TABLE kept (n int)")
    open_one = psycopg.connect(_dsn(postgres_url))
    open_one.execute("INSERT INTO kept VALUES (1)")
    postgres_server.kill()
    with pytest.raises(psycopg.OperationalError):
        open_one.execute("SELECT 1")
    open_one.close()
    postgres_server.start()
    with psycopg.connect(_dsn(postgres_url)) as connection:
        assert connection.execute("SELECT count(*) FROM kept").fetchone() == (0,)


def test_postgres_that_cannot_start_shows_its_log(services_dir: Path) -> None:
    server = Postgres(services_dir / "postgres-bad", extra=("-c", "nonsense=1"))
    with pytest.raises(ServiceError, match=r"(?s)postgres ended with status 1; the end of .*postgres\.log:.*nonsense"):
        server.start()
    server.stop()


@pytest.mark.parametrize("time", [1, 2])
def test_each_test_gets_an_empty_broker(rabbitmq: RabbitmqBroker, time: int) -> None:
    with kombu.Connection(rabbitmq.url) as connection, connection.SimpleQueue("queue") as queue:
        assert queue.qsize() == 0
        queue.put({"time": time})


def _put(url: str, body: str) -> None:
    with kombu.Connection(url, transport_options={"confirm_publish": True}) as connection:
        queue = kombu.Queue("durable", durable=True)
        connection.Producer().publish(body, routing_key="durable", declare=[queue], delivery_mode=2)


def _depth(url: str) -> int:
    with kombu.Connection(url) as connection:
        return int(kombu.Queue("durable", durable=True)(connection.default_channel).queue_declare().message_count)


def test_rabbitmq_keeps_confirmed_messages_through_a_kill_and_loses_them_when_wiped(rabbitmq: RabbitmqBroker) -> None:
    _put(rabbitmq.url, "one")
    rabbitmq.server.kill()
    rabbitmq.server.start()
    assert _depth(rabbitmq.url) == 1
    rabbitmq.wipe()
    assert _depth(rabbitmq.url) == 0


def test_rabbitmqctl_reaches_the_server_and_says_what_failed(rabbitmq: RabbitmqBroker) -> None:
    assert rabbitmq.vhost in rabbitmq.server.ctl("list_vhosts").split()
    with pytest.raises(ServiceError, match="no_such_command"):
        rabbitmq.server.ctl("no_such_command")


def test_rabbitmq_without_its_programs_says_what_to_run(rabbitmq_server: Rabbitmq) -> None:
    with pytest.raises(ServiceError, match=r"not installed.*\n.*make services"):
        Rabbitmq(rabbitmq_server.folder / "none", chroot=rabbitmq_server.folder).start()


def test_a_part_is_created_once(s3_server: S3Bucket) -> None:
    client = s3_server.endpoint.client()
    try:
        client.put_object(Bucket=s3_server.bucket, Key="part", Body=b"1", IfNoneMatch="*")
        with pytest.raises(ClientError, match="PreconditionFailed"):
            client.put_object(Bucket=s3_server.bucket, Key="part", Body=b"2", IfNoneMatch="*")
    finally:
        client.close()


def test_ceph_keeps_what_it_acknowledged_through_a_kill(ceph_s3: S3Bucket, ceph_server: Ceph) -> None:
    client = ceph_s3.endpoint.client()
    try:
        client.put_object(Bucket=ceph_s3.bucket, Key="part", Body=b"1")
        ceph_server.kill()
        ceph_server.start()
        with client.get_object(Bucket=ceph_s3.bucket, Key="part")["Body"] as body:
            assert body.read() == b"1"
    finally:
        client.close()


_PARENT = """
import sys, threading
import os
import select
import subprocess
import sys
from pathlib import Path
from deploy.native.process import Command, Process

folder = Path(sys.argv[1])
command = Command(name="sleep", argv=["sleep", "600"], env={}, cwd=folder, log=folder / "log", user="postgres")
process = Process(command)
starter = threading.Thread(target=process.start)
starter.start()
starter.join()  # the thread is gone, and its child is to stay
print(process.pid, flush=True)
sys.stdin.read()
"""


def test_a_service_ends_with_whoever_started_it_and_not_before(services_dir: Path) -> None:
    root = Path(__file__).parents[2]
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, services_dir],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    with parent:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        try:
            ended = select.poll()
            ended.register(child, select.POLLIN)
            assert not ended.poll(200)
            parent.kill()
            assert ended.poll(20_000)
        finally:
            os.close(child)
