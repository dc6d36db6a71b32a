"""Several processes on one SQLite file, some killed: every shard is committed exactly once."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.contract.store_jobs import SHARD_ROWS, make_job

from nightmill.records import RowCounts
from nightmill.states import JobStatus, ShardState
from nightmill.store import Store

WORKER = Path(__file__).with_name("store_worker.py")
NUM_SHARDS = 60


class Place:
    """One database, one folder of locks, one output."""

    def __init__(self, folder: Path) -> None:
        self.url = f"sqlite:///{folder / 'store.db'}"
        self.workers, self.parts = folder / "workers", folder / "parts"
        self.parts.mkdir()
        self.store = Store(self.url)
        self.store.migrate()
        self.job_id = make_job(self.store, NUM_SHARDS, max_failures=100).job_id

    def start(self, failpoint: str = "", num_claims: int | None = None) -> subprocess.Popen[str]:
        """A worker; with `num_claims` it waits after so many, until its stdin is closed."""
        command = [sys.executable, str(WORKER), self.url, str(self.workers), str(self.parts)]
        environ = os.environ | {"NIGHTMILL_FAILPOINT": failpoint}
        stdin = subprocess.DEVNULL if num_claims is None else subprocess.PIPE
        worker = subprocess.Popen(command, env=environ, stdin=stdin, stdout=subprocess.PIPE, text=True)
        if worker.stdin is not None and num_claims is not None:
            worker.stdin.write("\n" * num_claims)
            worker.stdin.flush()
        return worker

    def check_every_shard_once(self) -> None:
        info = self.store.job(self.job_id)
        total = NUM_SHARDS * SHARD_ROWS
        assert info.num_shards_by_state == {ShardState.COMMITTED: NUM_SHARDS}
        assert info.rows == RowCounts(total=total, completed=total)
        committed = self.store.shard_results(self.job_id)
        assert [Path(shard.result.part_uri).name for shard in committed] == sorted(
            path.name for path in self.parts.glob("part-*")
        )
        for shard in committed:
            assert shard.result.part_etag == Path(shard.result.part_uri).read_text(), "the part that stands is recorded"
        assert self.store.complete_job(self.job_id).status is JobStatus.COMPLETED


def kill_after(worker: subprocess.Popen[str], num_lines: int) -> None:
    """SIGKILL, wherever it is by now, once it has told so many lines."""
    assert worker.stdout is not None
    for _ in range(num_lines):
        worker.stdout.readline()
    worker.kill()
    worker.communicate()
    assert worker.returncode == -signal.SIGKILL


def test_three_processes_two_killed(tmp_path: Path) -> None:
    place = Place(tmp_path)
    dice = random.Random(7)
    # Together they may not claim every shard: the job is running when they are killed.
    workers = [place.start(num_claims=NUM_SHARDS // 4) for _ in range(3)]
    for worker in workers[:2]:
        kill_after(worker, dice.randint(1, 8))
    output, _ = workers[2].communicate()
    assert workers[2].returncode == 0
    assert output.endswith("done\n")
    assert list(place.workers.iterdir()) == []
    place.check_every_shard_once()
    place.store.close()


@pytest.mark.parametrize("failpoint", ["after_claim", "after_part_put", "before_commit", "after_commit"])
def test_each_crash_window(tmp_path: Path, failpoint: str) -> None:
    place = Place(tmp_path)
    doomed = place.start(f"{failpoint}:3")
    doomed.communicate()
    assert doomed.returncode == -signal.SIGKILL
    leased = place.store.job(place.job_id).num_shards_by_state.get(ShardState.LEASED, 0)
    assert leased == (0 if failpoint == "after_commit" else 1)
    assert len(list(place.workers.iterdir())) == 1, "the lock file of the dead"

    heir = place.start()
    output, _ = heir.communicate()
    assert heir.returncode == 0
    assert output.count("committed") == NUM_SHARDS - (3 if failpoint == "after_commit" else 2)
    assert list(place.workers.iterdir()) == []
    attempts = [shard.attempt for shard in place.store.shard_results(place.job_id)]
    assert sorted(attempts)[-1] == (1 if failpoint == "after_commit" else 2), "taken over at once, not after its time"
    place.check_every_shard_once()
    place.store.close()
