"""Workers as processes on a real broker and a real database."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.fleet_bench import FleetBench
from tests.services.servers import RabbitmqBroker

from nightmill.states import JobStatus, Tier


@pytest.fixture
def fleet(tmp_path: Path, postgres_url: str, rabbitmq: RabbitmqBroker) -> Iterator[FleetBench]:
    bench = FleetBench(
        tmp_path, {"DATABASE_URL": postgres_url, "CELERY_BROKER_URL": rabbitmq.url}, str(tmp_path / "data")
    )
    yield bench
    bench.close()


def test_two_workers_drain_three_jobs_of_three_tiers(fleet: FleetBench) -> None:
    fleet.start({"step_s": 0.005})
    fleet.start({"step_s": 0.005})
    jobs = {tier: fleet.submit(tier.value, 500, tier=tier) for tier in Tier}
    for job in fleet.wait(*jobs.values()):
        assert (job.status, job.rows.completed) == (JobStatus.COMPLETED, 500)
        fleet.check(job, 500)
