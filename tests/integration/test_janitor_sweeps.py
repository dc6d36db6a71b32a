"""The janitor on real files: it closes what was stopped, ends jobs, rings; and it may be killed anywhere."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import kombu
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.services.servers import RabbitmqBroker

from nightmill import messages
from nightmill.broker import Broker
from nightmill.config import Settings
from nightmill.errors import StoreError
from nightmill.janitor import LOST_AFTER, Janitor
from nightmill.output import CheckpointWriter, OutputFolder
from nightmill.output.closer import GIVE_UP_AFTER
from nightmill.records import Completion, JobInfo, JobOptions, JobSpec, ModelSpec, RowCounts
from nightmill.states import JobStatus, ShardState, Tier
from nightmill.storage import LocalStorage
from nightmill.store import Store
from nightmill.submit import submit_job
from nightmill.validate import plan_input

NUM_ROWS, SHARD_ROWS = 40, 10
JANITOR = [sys.executable, "-c", "from nightmill.cli.main import main; main()", "janitor"]


class Place:
    """A home with a store, and jobs in folders."""

    def __init__(self, folder: Path, url: str | None = None, broker_url: str | None = None) -> None:
        self.folder = folder
        self.environ = {"NIGHTMILL_HOME": str(folder / "home"), "HOME": str(folder)}
        if url is not None:
            self.environ["DATABASE_URL"] = url
        if broker_url is not None:
            self.environ["CELERY_BROKER_URL"] = broker_url
        self.settings = Settings.from_env(self.environ)
        self.store = Store(self.settings.database_url)
        self.store.migrate()

    def submit(self, name: str, **options: object) -> JobInfo:
        source = self.folder / f"{name}.parquet"
        if not source.exists():
            pq.write_table(
                pa.table({"prompt": [f"{name} {i}" for i in range(NUM_ROWS)]}), source, row_group_size=SHARD_ROWS
            )
        spec = JobSpec(inputs=(str(source),), output=str(self.folder / f"{name}-out"), model=ModelSpec(model="demo"))
        job_options = JobOptions(shard_rows=SHARD_ROWS, **options)  # type: ignore[arg-type]
        return submit_job(self.store, spec, job_options, check=lambda spec, _: plan_input(spec).source_schema)

    def janitor(self, broker: Broker | None = None) -> Janitor:
        return Janitor(self.store, self.settings, broker)

    def run_janitor(self, *arguments: str, failpoint: str = "") -> subprocess.CompletedProcess[str]:
        environ = os.environ | self.environ | {"NIGHTMILL_FAILPOINT": failpoint}
        return subprocess.run(
            [*JANITOR, *arguments], env=environ, capture_output=True, text=True, check=False, timeout=120
        )

    def check_output(self, name: str, **counts: int) -> None:
        """Every row once and in order, whatever killed whom; nothing but parts, manifest and marks."""
        out = self.folder / f"{name}-out"
        parts = sorted(out.glob("part-*.parquet"))
        assert len(parts) == NUM_ROWS // SHARD_ROWS
        rows = [row for part in parts for row in pq.read_table(part).to_pylist()]
        assert [row["prompt"] for row in rows] == [f"{name} {i}" for i in range(NUM_ROWS)]
        assert [row["row_index"] for row in rows] == list(range(NUM_ROWS))
        assert json.loads((out / "_manifest.json").read_text())["rows"] == {"total": NUM_ROWS, **counts}
        assert not list(out.glob("_nightmill/*/shard-*"))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.store.close()


def test_what_was_cancelled_is_closed_and_ended_in_one_sweep(place: Place) -> None:
    job_id = place.submit("a").job_id
    other = place.submit("b").job_id
    place.store.cancel(job_id)
    report = place.janitor().sweep()
    assert (report.granted, report.num_closed, report.ended, report.troubles) == (True, 4, [job_id], [])
    info = place.store.job(job_id)
    assert (info.status, info.rows) == (JobStatus.CANCELLED, RowCounts(total=40, cancelled=40))
    assert place.store.job(other).status is JobStatus.QUEUED
    place.check_output("a", completed=0, failed=0, cancelled=40)
    assert not place.janitor().sweep().did_something


def test_what_has_expired_is_closed(place: Place) -> None:
    job_id = place.submit("a", expires_in_s=-1.0).job_id
    assert place.janitor().sweep().ended == [job_id]
    assert place.store.job(job_id).status is JobStatus.EXPIRED
    place.check_output("a", completed=0, failed=0, cancelled=40)


def test_a_used_up_budget_discards(place: Place) -> None:
    job_id = place.submit("a", max_failures=1).job_id
    for shard_id in place.store.available_shards(10):
        lease = place.store.claim(shard_id, "w", -1.0)
        assert lease is not None
    report = place.janitor().sweep()
    assert (report.num_expired, report.num_closed, report.ended) == (4, 4, [job_id])
    assert place.store.job(job_id).status is JobStatus.FAILED
    place.check_output("a", completed=0, failed=40, cancelled=0)


def test_the_trouble_of_one_job_is_not_the_next_ones(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    moment = [1000.0]
    monkeypatch.setattr("nightmill.janitor.time.monotonic", lambda: moment[0])
    broken, sound = place.submit("a").job_id, place.submit("b").job_id
    for job_id in (broken, sound):
        place.store.cancel(job_id)
    shutil.move(place.folder / "a.parquet", place.folder / "away.parquet")
    janitor = place.janitor()
    report = janitor.sweep()
    assert report.ended == [sound]
    assert len(report.troubles) == 1
    assert broken in report.troubles[0]
    assert place.store.job(broken).num_shards_by_state == {ShardState.AVAILABLE: 4}

    assert janitor.sweep().troubles == [], "not again at once"
    moment[0] += 5
    assert len(janitor.sweep().troubles) == 1
    shutil.move(place.folder / "away.parquet", place.folder / "a.parquet")
    moment[0] += 5
    assert not janitor.sweep().did_something, "the second pause is longer"
    moment[0] += 5
    assert janitor.sweep().ended == [broken]
    place.check_output("a", completed=0, failed=0, cancelled=40)


def test_an_input_that_stays_away_is_done_without(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder may just not be mounted; but a job must end."""
    moment = [1000.0]
    monkeypatch.setattr("nightmill.janitor.time.monotonic", lambda: moment[0])
    job_id = place.submit("a").job_id
    place.store.cancel(job_id)
    (place.folder / "a.parquet").unlink()
    janitor = place.janitor()
    for _ in range(GIVE_UP_AFTER):
        assert len(janitor.sweep().troubles) == 1
        moment[0] += 10
    assert janitor.sweep().ended == [job_id]
    assert place.store.job(job_id).rows == RowCounts(total=40, cancelled=40)
    rows = [row for part in sorted((place.folder / "a-out").glob("part-*")) for row in pq.read_table(part).to_pylist()]
    assert [(row["row_index"], row["prompt"], row["error_code"]) for row in rows] == [
        (i, None, "batch_cancelled") for i in range(NUM_ROWS)
    ]


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_job_whose_part_is_gone_is_not_open_for_ever(
    place: Place, monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    moment = [1000.0]
    monkeypatch.setattr("nightmill.janitor.time.monotonic", lambda: moment[0])
    job_id = place.submit("a").job_id
    place.store.cancel(job_id)
    with monkeypatch.context() as patched:
        patched.setattr("nightmill.janitor.MAX_ENDINGS", 0)
        assert place.janitor().sweep().num_closed == 4
    part = place.folder / "a-out/part-00002.parquet"
    shutil.move(part, place.folder / "away.parquet")
    janitor = place.janitor()
    for _ in range(LOST_AFTER):
        assert "part-00002.parquet is gone" in janitor.sweep().troubles[0]
        assert place.store.job(job_id).status is JobStatus.CANCELLING
        moment[0] += 301
    if comes_back:
        shutil.move(place.folder / "away.parquet", part)
    assert janitor.sweep().ended == [job_id]
    info = place.store.job(job_id)
    assert (info.status, info.rows) == (JobStatus.CANCELLED, RowCounts(total=40, cancelled=40))
    assert info.error_code == (None if comes_back else "part_lost")
    assert (place.folder / "a-out/_manifest.json").exists() is comes_back
    assert not janitor.sweep().did_something


def test_an_input_that_was_overwritten_is_done_without_at_once(place: Place) -> None:
    job_id = place.submit("a").job_id
    place.store.cancel(job_id)
    pq.write_table(pa.table({"prompt": ["x"] * 100}), place.folder / "a.parquet")
    assert place.janitor().sweep().ended == [job_id]
    rows = pq.read_table(place.folder / "a-out" / "part-00003.parquet").to_pylist()
    assert [(row["prompt"], row["error_code"]) for row in rows] == [(None, "batch_cancelled")] * SHARD_ROWS


def test_a_retry_that_lost_its_input_keeps_the_part_that_stood(place: Place) -> None:
    job_id = place.submit("a").job_id
    place.store.cancel(job_id)
    janitor = place.janitor()
    janitor.sweep()
    assert place.store.reset_failed_rows(job_id) == 4
    pq.write_table(pa.table({"prompt": ["x"] * 100}), place.folder / "a.parquet")
    place.store.cancel(job_id)
    assert janitor.sweep().ended == [job_id]
    place.check_output("a", completed=0, failed=0, cancelled=40)


def test_a_sweep_is_bounded(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nightmill.janitor.MAX_CLOSINGS", 3)
    for name in "ab":
        place.store.cancel(place.submit(name).job_id)
    janitor = place.janitor()
    assert [janitor.sweep().num_closed for _ in range(4)] == [3, 3, 2, 0]
    assert {job.status for job in place.store.jobs()} == {JobStatus.CANCELLED}


def test_a_retry_that_was_stopped_keeps_what_it_had_and_what_stood(place: Place) -> None:
    job_id = place.submit("a").job_id
    store, storage = place.store, LocalStorage()
    store.cancel(job_id)
    janitor = place.janitor()
    janitor.sweep()
    assert store.reset_failed_rows(job_id) == 4
    lease = store.claim(store.available_shards(1)[0], "w")
    assert lease is not None
    folder = OutputFolder(store.job(job_id).spec.output, job_id)
    writer = CheckpointWriter(storage, folder.checkpoints(lease.generation), lease.range.index, lease.attempt)
    writer.add(
        Completion(
            row_index=3,
            custom_id="a.parquet#3",
            text="at last",
            finish_reason="stop",
            prompt_tokens=1,
            completion_tokens=2,
        )
    )
    writer.flush()
    store.cancel(job_id)
    store.release(lease, failed=False, progressed=True)

    assert janitor.sweep().ended == [job_id]
    assert store.job(job_id).rows == RowCounts(total=40, completed=1, cancelled=39)
    rows = pq.read_table(folder.part(0)).to_pylist()
    assert [row["completion"] for row in rows] == [None, None, None, "at last", *[None] * 6]
    assert {row["error_code"] for row in rows} == {None, "batch_cancelled"}
    place.check_output("a", completed=1, failed=0, cancelled=39)


@pytest.mark.parametrize("failpoint", ["after_part_put:2", "before_commit:3", "in_finalize"])
def test_a_janitor_that_is_killed_is_followed_by_another(place: Place, failpoint: str) -> None:
    job_id = place.submit("a").job_id
    place.store.cancel(job_id)
    killed = place.run_janitor("--once", failpoint=failpoint)
    assert killed.returncode == -signal.SIGKILL
    assert place.store.job(job_id).status is JobStatus.CANCELLING
    heir = place.run_janitor("--once", "--json")
    assert heir.returncode == 0, heir.stderr
    report = json.loads(heir.stdout)
    assert report["ended"] == [job_id]
    assert (report["num_dead"] == 0) == (failpoint == "in_finalize"), "at once, not when its leases run out"
    assert place.store.job(job_id).status is JobStatus.CANCELLED
    place.check_output("a", completed=0, failed=0, cancelled=40)
    attempts = [shard.attempt for shard in place.store.shard_results(job_id)]
    assert sorted(attempts)[-1] == (1 if failpoint == "in_finalize" else 2)


def test_the_loop_ends_with_a_signal_and_logs_json(place: Place) -> None:
    job_id = place.submit("a").job_id
    place.store.cancel(job_id)
    with subprocess.Popen(JANITOR, env=os.environ | place.environ, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        first = json.loads(process.stderr.readline())
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
    assert process.returncode == 0
    assert (first["level"], first["logger"]) == ("info", "nightmill.janitor")
    assert f"ended {job_id}" in first["message"]
    assert all(json.loads(line)["level"] == "info" for line in rest.splitlines())
    assert place.store.job(job_id).status is JobStatus.CANCELLED
    assert list((place.folder / "home" / "workers").iterdir()) == []


def test_a_store_that_is_away_ends_the_sweep_and_not_the_loop(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    janitor = place.janitor()
    stop = threading.Event()
    tries: list[int] = []

    def away(*_: object) -> int:
        tries.append(1)
        if len(tries) == 2:
            stop.set()
        raise StoreError("away")

    monkeypatch.setattr(place.store, "expire_leases", away)
    monkeypatch.setattr("nightmill.janitor.EVERY_S", 0.001)
    with pytest.raises(StoreError):
        janitor.sweep()
    janitor.run(stop)
    assert len(tries) == 2


def test_embedded_stores_owe_nothing(place: Place) -> None:
    """Nobody would ever read it."""
    place.submit("a")
    assert not place.store.owes_rings()


# With PostgreSQL and RabbitMQ


@pytest.fixture
def broker(rabbitmq: RabbitmqBroker) -> Iterator[Broker]:
    broker = Broker(rabbitmq.url)
    yield broker
    broker.close()


@pytest.fixture
def fleet(tmp_path: Path, postgres_url: str, rabbitmq: RabbitmqBroker) -> Iterator[Place]:
    place = Place(tmp_path, postgres_url, rabbitmq.url)
    yield place
    place.store.close()


def heard(url: str, tier: Tier = Tier.NORMAL) -> list[int]:
    found = []
    with kombu.Connection(url) as connection, connection.channel() as channel:
        while (message := channel.basic_get(messages.QUEUES[tier], no_ack=True)) is not None:
            found.append(messages.decode(json.loads(message.body)[0][0]))
    return found


def test_a_relay_that_is_killed_between_publish_and_commit_rings_twice_and_loses_nothing(
    fleet: Place, rabbitmq: RabbitmqBroker
) -> None:
    fleet.submit("a")
    ids = fleet.store.available_shards(10)
    assert fleet.run_janitor("--once", failpoint="after_publish").returncode == -signal.SIGKILL
    assert fleet.store.num_owed() == 4
    assert heard(rabbitmq.url) == ids
    done = fleet.run_janitor("--once", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_rings"] == 4
    assert fleet.store.num_owed() == 0
    assert heard(rabbitmq.url) == ids


def test_a_wiped_broker_is_rung_again_for_what_waits(fleet: Place, rabbitmq: RabbitmqBroker, broker: Broker) -> None:
    fleet.submit("a")
    ids = fleet.store.available_shards(10)
    janitor = Janitor(fleet.store, Settings.from_env(fleet.environ | {"NIGHTMILL_RING_AFTER_S": "0.001"}), broker)
    assert janitor.sweep().num_rings == 4
    time.sleep(0.01)  # older than a millisecond
    assert janitor.sweep().num_stale == 0, "they wait in the queue"
    rabbitmq.wipe()
    report = janitor.sweep()
    assert (report.num_stale, report.num_rings) == (4, 4)
    assert heard(rabbitmq.url) == ids


def test_a_broker_that_is_down_stops_nothing_else(fleet: Place, rabbitmq: RabbitmqBroker) -> None:
    job_id = fleet.submit("a").job_id
    fleet.store.cancel(job_id)
    fleet.submit("b")
    report = fleet.janitor(Broker("amqp://guest:guest@127.0.0.1:1/", timeout_s=2.0)).sweep()
    assert report.ended == [job_id]
    assert len(report.troubles) == 2
    assert all("refused" in trouble for trouble in report.troubles)
    assert fleet.store.num_owed() == 4


def test_an_outage_is_told_once(fleet: Place, caplog: pytest.LogCaptureFixture) -> None:
    fleet.submit("a")
    janitor = fleet.janitor(Broker("amqp://guest:guest@127.0.0.1:1/", timeout_s=2.0))
    janitor.sweep()
    assert "the outbox" in caplog.text
    janitor.sweep()
    caplog.clear()
    report = janitor.sweep()
    assert (report.is_only_trouble, caplog.text) == (True, "")


def test_while_another_janitor_is_at_work_only_the_outbox_is_seen_to(fleet: Place, broker: Broker) -> None:
    job_id = fleet.submit("a").job_id
    fleet.store.cancel(job_id)
    fleet.submit("b")
    other = Store(fleet.settings.database_url)
    with other.janitor_lock() as granted:
        assert granted
        report = fleet.janitor(broker).sweep()
    assert (report.granted, report.num_closed, report.ended) == (False, 0, [])
    assert fleet.store.num_owed() == 0
    assert fleet.janitor(broker).sweep().ended == [job_id]
    other.close()
