"""Jobs as the store would describe them, made up."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from nightmill.records import JobInfo, JobOptions, JobSpec, ModelSpec, RowCounts, TokenCounts
from nightmill.states import JobStatus, ShardState

T0 = datetime(2026, 11, 29, 12, tzinfo=UTC)
INFO = JobInfo(
    job_id="job-20261129-g4kz7m2q",
    status=JobStatus.IN_PROGRESS,
    spec_digest="0" * 64,
    spec=JobSpec(inputs=("/in",), output="/out", model=ModelSpec(model="org/name")),
    options=JobOptions(),
    rows=RowCounts(total=60_000),
    tokens=TokenCounts(),
    num_shards=30,
    num_shards_by_state={ShardState.AVAILABLE: 7, ShardState.LEASED: 3, ShardState.COMMITTED: 20},
    created_at=T0,
    started_at=T0,
)


@pytest.fixture
def make_info() -> Callable[..., JobInfo]:
    """A job in progress, with these fields changed."""

    def make(**changes: Any) -> JobInfo:
        return replace(INFO, **changes)

    return make
