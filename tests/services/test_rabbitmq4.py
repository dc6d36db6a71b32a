"""The fleet on RabbitMQ 4.0, with both kinds of queue, through a kill of the broker."""

from pathlib import Path

import pytest
from tests.integration.fleet_bench import FleetBench
from tests.services.servers import RabbitmqBroker

from nightmill.states import JobStatus

pytestmark = pytest.mark.long


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
def test_case_I093_a_fleet_works_on_rabbitmq_4(
    tmp_path: Path, postgres_url: str, rabbitmq4: RabbitmqBroker, queue_type: str
) -> None:
    assert rabbitmq4.server.ctl("version").strip().startswith("4.0.")
    environment = {
        "DATABASE_URL": postgres_url,
        "CELERY_BROKER_URL": rabbitmq4.url,
        "NIGHTMILL_QUEUE_TYPE": queue_type,
    }
    bench = FleetBench(tmp_path, environment, str(tmp_path))
    try:
        worker = bench.start({"step_s": 0.02})
        first = bench.submit("one", 400)
        worker.wait_for_log("committed")
        queues = rabbitmq4.server.ctl("list_queues", "-p", rabbitmq4.vhost, "name", "type").splitlines()
        kinds = dict(line.split("\t") for line in queues if line.startswith("nightmill.") and ".unused." not in line)
        assert kinds == {f"nightmill.{tier}.v1": queue_type for tier in ("high", "normal", "low")}

        heard = worker.log.count("listening to")
        rabbitmq4.server.kill()
        rabbitmq4.server.start()
        worker.wait_for_log("listening to", count=heard + 1)
        second = bench.submit("two", 200)
        for job, rows in zip(bench.wait(first, second), (400, 200), strict=True):
            assert job.status is JobStatus.COMPLETED
            bench.check(job, rows)
        assert worker.process.poll() is None
        assert "Unrecoverable" not in worker.log
    finally:
        bench.close()
