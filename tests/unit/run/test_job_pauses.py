import itertools
import time

import pytest

from nightmill.errors import EngineError, FencedError, StorageError, StoreError, ValidationError
from nightmill_worker import fleet_jobs
from nightmill_worker.fleet_jobs import JobPauses


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_case_I030_a_job_that_fails_is_left_alone_longer_each_time(clock: list[float]) -> None:
    pauses = JobPauses()
    lengths = []
    for _ in range(9):
        lengths.append(pauses.failed("a"))
        assert pauses.is_paused("a")
        assert not pauses.is_paused("b")
        clock[0] += lengths[-1]
        assert not pauses.is_paused("a")
    assert lengths[0] < 1.3
    assert all(later > 1.3 * earlier for earlier, later in itertools.pairwise(lengths[:6]))
    assert max(lengths) <= fleet_jobs.MAX_PAUSE_S * 1.2
    # Five failures, the budget of a shard, fit into a minute.
    assert sum(lengths[:5]) < 60


def test_neighbours_that_fail_in_a_pause_do_not_lengthen_it(clock: list[float]) -> None:
    pauses = JobPauses()
    first = pauses.failed("a")
    assert pauses.failed("a") == pytest.approx(first)
    pauses.succeeded("a")
    assert not pauses.is_paused("a")


def test_a_store_that_is_away_is_not_charged_to_a_shard_until_patience_ends(clock: list[float]) -> None:
    pauses = JobPauses()
    for error in (StoreError(), EngineError(), FencedError(), KeyboardInterrupt()):
        assert not pauses.charges("a", error)
    for error in (ValueError(), ValidationError()):
        assert pauses.charges("a", error)
    assert not pauses.charges("a", StorageError())
    pauses.failed("a")
    clock[0] += fleet_jobs.STORAGE_PATIENCE_S
    assert not pauses.charges("a", StorageError())
    clock[0] += 1
    assert pauses.charges("a", StorageError())
    assert not pauses.charges("a", StoreError())
    pauses.succeeded("a")
    assert not pauses.charges("a", StorageError())
