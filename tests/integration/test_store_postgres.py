"""What only a server shows: many at once, locks that cross, a crash in the middle, an answer that is lost."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from sqlalchemy import Connection, event, text
from sqlalchemy.exc import DBAPIError
from tests.contract.store_jobs import PAST, claim_first, commit_all, make_job, make_result

from deploy.native.postgres import Postgres
from nightmill.errors import FencedError, StoreError
from nightmill.records import RowCounts, ShardProgress
from nightmill.states import JobStatus, ShardState
from nightmill.store import Store, database, janitor_lock
from nightmill.store.database import Database


@pytest.fixture
def store(postgres_url: str) -> Iterator[Store]:
    store = Store(postgres_url)
    store.migrate()
    yield store
    store.close()


def at_once(*actions: Callable[[], object]) -> list[object]:
    """Run them on threads that start together; their results in order, and their exceptions raised."""
    barrier = threading.Barrier(len(actions))

    def run(action: Callable[[], object]) -> object:
        barrier.wait()
        return action()

    with ThreadPoolExecutor(len(actions)) as pool:
        return [future.result() for future in [pool.submit(run, action) for action in actions]]


# Many at once


def test_of_sixteen_claims_one_is_granted(store: Store) -> None:
    job_id = make_job(store, 20).job_id
    for shard_id in store.available_shards(20):
        claims = [lambda n=n, i=shard_id: store.claim(i, f"w{n}") for n in range(16)]
        leases = [lease for lease in at_once(*claims) if lease is not None]
        assert len(leases) == 1
    assert store.job(job_id).num_shards_by_state == {ShardState.LEASED: 20}


def test_sixteen_workers_with_zombies_commit_every_shard_once(postgres_url: str, store: Store) -> None:
    """Leases run out at once, so every commit races with an heir's claim."""
    num_shards = 60
    job_id = make_job(store, num_shards, max_failures=10_000).job_id
    accepted: Counter[int] = Counter()
    lock = threading.Lock()

    def work(number: int) -> None:
        mine = Store(postgres_url)
        try:
            while not mine.begin_finalize(job_id):
                mine.expire_leases()
                for shard_id in mine.available_shards(3, job_id):
                    lease = mine.claim(shard_id, f"w{number}", PAST if number % 2 else 30.0)
                    if lease is None:
                        continue
                    try:
                        mine.commit_shard(lease, make_result(lease, etag=f"{number}-{lease.attempt}"))
                    except FencedError:
                        continue
                    with lock:
                        accepted[shard_id] += 1
        finally:
            mine.close()

    at_once(*(lambda n=n: work(n) for n in range(16)))
    assert set(accepted.values()) == {1}
    info = store.complete_job(job_id)
    assert (info.status, info.rows) == (JobStatus.COMPLETED, RowCounts(total=600, completed=600))


def test_one_idempotency_key_makes_one_job(store: Store) -> None:
    for n in range(5):
        ids = at_once(*(lambda n=n: make_job(store, 2, idempotency_key=f"k{n}").job_id for _ in range(8)))
        assert len(set(ids)) == 1
    assert len(store.jobs()) == 5
    assert store.num_owed() == 10


def test_two_retries_at_once_open_one_generation(store: Store) -> None:
    job_id = make_job(store, 2).job_id
    for _ in range(2):
        lease = claim_first(store)
        store.commit_shard(lease, make_result(lease, failed=1))
    store.begin_finalize(job_id)
    store.complete_job(job_id)
    store.relay_outbox(lambda rings: None)
    assert at_once(*(lambda: store.reset_failed_rows(job_id) for _ in range(4))) == [2] * 4
    assert store.job(job_id).generation == 1
    assert store.num_owed() == 2


def test_heartbeats_and_the_janitor_do_not_lock_crosswise(store: Store) -> None:
    """Each locks the same 40 rows; were it not in one order, PostgreSQL would have to kill one of them."""
    make_job(store, 40, max_failures=10_000)
    shard_ids = [claim_first(store, "w1", PAST).shard_id for _ in range(40)]
    troubles: list[str] = []

    @event.listens_for(store._database.engine, "handle_error")
    def _note(context: object) -> None:
        troubles.append(str(getattr(context, "original_exception", "")))

    for attempt in range(1, 11):
        beats = {shard_id: ShardProgress(attempt=attempt) for shard_id in shard_ids}
        at_once(
            partial(store.heartbeat, "w1", beats, PAST),
            partial(store.heartbeat, "w1", dict(reversed(beats.items())), PAST),
            store.expire_leases,
            partial(store.release_dead, ["w1"]),
        )
        assert store.available_shards(100) == shard_ids
        for shard_id in shard_ids:
            store.claim(shard_id, "w1", PAST)
    assert troubles == []


def test_a_lease_that_is_being_renewed_is_not_taken_back(store: Store) -> None:
    make_job(store, 2)
    renewed, late = claim_first(store, "w1", PAST), claim_first(store, "w1", PAST)
    database = store._database
    with database.engine.connect() as connection, connection.begin():
        connection.execute(text("SELECT 1 FROM shards WHERE shard_id = :id FOR UPDATE"), {"id": renewed.shard_id})
        assert store.expire_leases() == 1
    assert store.available_shards(10) == [late.shard_id]


def test_relays_at_once_share_the_outbox(store: Store) -> None:
    make_job(store, 2000)
    heard: list[int] = []
    lock = threading.Lock()

    def relay() -> None:
        def publish(rings: object) -> None:
            with lock:
                heard.extend(ring.shard_id for ring in rings)  # type: ignore[attr-defined]

        while store.relay_outbox(publish, 100):
            pass

    at_once(*(relay for _ in range(4)))
    assert sorted(heard) == sorted(store.available_shards(3000))


def test_one_janitor_at_a_time_and_the_next_when_it_dies(postgres_url: str, store: Store) -> None:
    other = Store(postgres_url)
    with store.janitor_lock() as mine:
        assert mine
        with other.janitor_lock() as theirs:
            assert not theirs
        store._database.write(_cut_off_others)  # its session ends: the lock goes with it
        with other.janitor_lock() as theirs:
            assert theirs
    with store.janitor_lock() as mine:
        assert mine
    other.close()


def test_case_I081_a_janitor_that_stands_still_loses_the_lock(
    postgres_url: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(janitor_lock, "STALLED_S", 1)
    other = Store(postgres_url)
    with store.janitor_lock() as mine:
        assert mine  # and nothing more is heard of us
        with other._database.engine.connect() as connection, connection.begin():
            connection.execute(text("SET LOCAL lock_timeout = '60s'"))
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": janitor_lock._KEY})
        with other.janitor_lock() as theirs:
            assert theirs
    with store.janitor_lock() as mine:  # leaving a lock that was lost is no error, and what the pool has is in order
        assert mine
    other.close()


def test_case_I081_what_a_process_locked_in_a_transaction_is_free_again_when_it_stands_still(
    postgres_url: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_job(store, 1)
    lease = claim_first(store, "w1", PAST)
    monkeypatch.setattr(database, "STALLED_S", 1)
    stalled = Database(postgres_url)
    with stalled.engine.connect() as connection:
        connection.execute(text("SELECT 1 FROM shards FOR UPDATE"))  # and no word more
        store.commit_shard(lease, make_result(lease))
        with pytest.raises(DBAPIError) as refused:
            connection.execute(text("SELECT 1"))
    assert store.job(lease.job_id).num_shards_by_state == {ShardState.COMMITTED: 1}
    assert database.can_retry(refused.value)
    stalled.close()


def _cut_off_others(connection: Connection) -> None:
    connection.execute(
        text(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
    )
    while connection.scalar(
        text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid <> pg_backend_pid()")
    ):
        time.sleep(0.01)  # until the server has noticed: it has no event for that


# Answers that are lost


def lose_next_commit(database: Database) -> None:
    """The server commits, and the connection is gone before it can say so."""

    @event.listens_for(database.engine, "commit")
    def _before_commit(connection: Connection) -> None:
        if not lost:
            lost.append(1)
            raw = connection.connection.driver_connection
            assert raw is not None
            raw.commit()
            raw.close()

    lost: list[int] = []


def test_a_claim_whose_commit_answer_was_lost_is_ours(store: Store) -> None:
    make_job(store, 1)
    (shard_id,) = store.available_shards(1)
    lose_next_commit(store._database)
    lease = store.claim(shard_id, "w1")
    assert lease is not None
    assert lease.attempt == 1
    lose_next_commit(store._database)
    store.commit_shard(lease, make_result(lease))


def test_a_submit_whose_commit_answer_was_lost_is_there_once(store: Store) -> None:
    lose_next_commit(store._database)
    job_id = make_job(store, 3).job_id
    assert [job.job_id for job in store.jobs()] == [job_id]
    assert store.num_owed() == 3


def test_a_retry_whose_commit_answer_was_lost_is_done_once(store: Store) -> None:
    job_id = make_job(store, 1).job_id
    lease = claim_first(store)
    store.commit_shard(lease, make_result(lease, failed=1))
    store.begin_finalize(job_id)
    lose_next_commit(store._database)
    assert store.complete_job(job_id).status is JobStatus.COMPLETED
    lose_next_commit(store._database)
    assert store.reset_failed_rows(job_id) == 1
    assert store.job(job_id).generation == 1


# A server that goes away


def test_a_crash_of_the_server_is_waited_out(store: Store, postgres_server: Postgres) -> None:
    make_job(store, 2)
    first, second = store.available_shards(2)
    held = store.claim(first, "w1")
    assert held is not None
    postgres_server.kill()
    with ThreadPoolExecutor(1) as pool:
        claim = pool.submit(store.claim, second, "w1")
        postgres_server.start()  # here: the server dies with the thread that starts it
        lease = claim.result()
    assert lease is not None
    assert store.heartbeat("w1", {lease.shard_id: ShardProgress(attempt=1) for lease in (held, lease)}) == frozenset()
    store.commit_shard(held, make_result(held))


def test_a_crash_in_the_middle_of_a_claim_runs_it_again(store: Store, postgres_server: Postgres) -> None:
    make_job(store, 1)
    (shard_id,) = store.available_shards(1)
    crashed: list[int] = []

    @event.listens_for(store._database.engine, "after_cursor_execute")
    def _crash(_c: object, _cursor: object, statement: str, *_: object) -> None:
        if statement.startswith("UPDATE shards") and not crashed:
            crashed.append(1)
            postgres_server.kill()
            postgres_server.start()

    lease = store.claim(shard_id, "w1")
    assert crashed == [1]
    assert lease is not None
    assert lease.attempt == 1, "what was not committed has not happened"


def test_a_crash_while_workers_work_loses_and_doubles_nothing(
    postgres_url: str, store: Store, postgres_server: Postgres
) -> None:
    job_id = make_job(store, 150).job_id
    working = threading.Semaphore(0)

    def work(number: int) -> None:
        mine = Store(postgres_url)
        try:
            while shard_ids := mine.available_shards(2, job_id):
                for shard_id in shard_ids:
                    lease = mine.claim(shard_id, f"w{number}")
                    if lease is not None:
                        mine.commit_shard(lease, make_result(lease))
                        working.release()
        finally:
            mine.close()

    with ThreadPoolExecutor(4) as pool:
        workers = [pool.submit(work, number) for number in range(4)]
        for _ in range(2):
            for _ in range(20):
                working.acquire()
            postgres_server.kill()
            postgres_server.start()
        for worker in workers:
            worker.result()
    commit_all(store, job_id)
    assert store.begin_finalize(job_id)
    info = store.complete_job(job_id)
    assert info.rows == RowCounts(total=1500, completed=1500)
    assert {shard.attempt for shard in store.shard_results(job_id)} == {1}


@pytest.mark.parametrize(
    ("change", "words"),
    [(("/test_", "/nowhere_"), "does not exist"), (("postgres@", "nobody@"), "does not exist")],
)
def test_what_no_patience_heals_is_told_at_once(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, change: tuple[str, str], words: str
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("nightmill.store.database.time.sleep", waits.append)
    store = Store(postgres_url.replace(*change))
    with pytest.raises(StoreError, match=words):
        store.jobs()
    assert waits == []
    store.close()


def test_a_server_that_stays_away_is_told_without_the_password(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("nightmill.store.database.time.sleep", waits.append)
    store = Store("postgresql+psycopg://user:secret@127.0.0.1:1/nightmill")
    with pytest.raises(StoreError, match="PostgreSQL runs there") as caught:
        store.jobs()
    assert "secret" not in str(caught.value)
    assert 15 < sum(waits) < 30
    store.close()
