"""A short chaos run on the session's servers; `make chaos` is the long one."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.chaos.drill import Drill, run_drill

from deploy.native.ceph import Ceph
from deploy.native.postgres import Postgres
from deploy.native.rabbitmq import Rabbitmq, RabbitmqOptions


@pytest.mark.parametrize(
    ("seed", "duration_s", "rows"),
    [(11, 12.0, 3000), pytest.param(12, 60.0, 30_000, marks=pytest.mark.long)],
)
def test_nothing_is_lost_whatever_is_killed(
    seed: int,
    duration_s: float,
    rows: int,
    tmp_path: Path,
    postgres_server: Postgres,
    rabbitmq_factory: Callable[[RabbitmqOptions], Rabbitmq],
    ceph_server: Ceph,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR, "nightmill")
    for server in (postgres_server, ceph_server):
        if not server.running:
            server.start()
    drill = Drill(
        seed=seed,
        duration_s=duration_s,
        rows=rows,
        folder=tmp_path,
        postgres=postgres_server,
        rabbitmq=rabbitmq_factory(RabbitmqOptions()),
        ceph=ceph_server,
    )
    result = run_drill(drill)
    assert result.violations == []
    assert result.rows == result.distinct > rows
    assert all(result.kills.values()), result.kills
