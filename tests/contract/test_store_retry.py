"""Retry: a job that has ended runs again for its rows without an answer, and its parts stand meanwhile."""

import pytest
from sqlalchemy import update
from sqlalchemy.exc import IntegrityError
from tests.contract.store_jobs import (
    PAST,
    SHARD_ROWS,
    claim_first,
    close_all,
    commit_all,
    make_job,
    make_result,
    states,
)

from nightmill.errors import JobStateError, NotFoundError
from nightmill.records import JobInfo, RowCounts, ShardProgress
from nightmill.schema import shards
from nightmill.states import JobStatus, ShardState
from nightmill.store import Store, retry


def ended_job(store: Store, *failed: int, **options: object) -> str:
    """A completed job, one shard for each number of failed rows."""
    job_id = make_job(store, len(failed), **options).job_id
    for number in failed:
        lease = claim_first(store)
        store.commit_shard(lease, make_result(lease, failed=number, etag=f"etag-{lease.range.index}"))
    end(store, job_id)
    return job_id


def end(store: Store, job_id: str) -> JobInfo:
    assert store.begin_finalize(job_id)
    return store.complete_job(job_id)


def test_shards_with_failed_rows_run_again_and_the_others_stay(store: Store) -> None:
    job_id = ended_job(store, 0, 3, 0, 10)
    store.relay_outbox(lambda rings: None, 100)
    before = store.job(job_id)
    assert store.reset_failed_rows(job_id) == 2

    info = store.job(job_id)
    assert (info.status, info.generation) == (JobStatus.QUEUED, 1)
    assert (info.error_code, info.finished_at, info.started_at) == (None, None, before.started_at)
    assert info.num_shards_by_state == {ShardState.COMMITTED: 2, ShardState.AVAILABLE: 2}
    assert info.rows == RowCounts(total=40, completed=27), "what failed is open again"
    assert info.error_codes == {}
    assert store.num_owed() == 2

    lease = claim_first(store)
    assert (lease.range.index, lease.attempt, lease.generation, lease.replaces_etag) == (1, 2, 1, "etag-1")
    assert lease.num_failures == 0
    store.commit_shard(lease, make_result(lease, etag="new"))
    last = claim_first(store)
    store.commit_shard(last, make_result(last, failed=4, etag="newer"))
    info = end(store, job_id)
    assert (info.status, info.rows) == (JobStatus.COMPLETED, RowCounts(total=40, completed=36, failed=4))
    assert info.error_codes == {"null_prompt": 4}
    assert [shard.result.part_etag for shard in store.shard_results(job_id)] == ["etag-0", "new", "etag-2", "newer"]


def test_a_first_attempt_creates_its_part(store: Store) -> None:
    make_job(store, 1)
    lease = claim_first(store)
    assert (lease.generation, lease.replaces_etag) == (0, None)


def test_the_part_that_stands_is_known_to_every_attempt_until_one_commits(store: Store) -> None:
    job_id = ended_job(store, 2)
    store.reset_failed_rows(job_id)
    dead = claim_first(store, "w1", PAST)
    store.heartbeat("w1", {dead.shard_id: ShardProgress(attempt=2, rows_completed=9, rows_durable=9)}, PAST)
    store.expire_leases()
    heir = claim_first(store, "w2")
    assert (heir.attempt, heir.num_failures, heir.replaces_etag) == (3, 0, "etag-0"), "a row more is durable"
    store.commit_shard(heir, make_result(heir, etag="new"))
    assert end(store, job_id).rows == RowCounts(total=10, completed=10)


def test_retries_go_on_counting(store: Store) -> None:
    job_id = ended_job(store, 1)
    for generation in (1, 2, 3):
        assert store.reset_failed_rows(job_id) == 1
        lease = claim_first(store)
        assert (lease.generation, lease.attempt) == (generation, generation + 1)
        store.commit_shard(lease, make_result(lease, failed=1, etag=f"g{generation}"))
        assert end(store, job_id).generation == generation
    shard = store.shard_results(job_id)[0]
    assert shard.result.part_etag == "g3"


def test_nothing_failed_nothing_happens(store: Store) -> None:
    job_id = ended_job(store, 0, 0)
    before = store.job(job_id)
    assert store.reset_failed_rows(job_id) == 0
    assert store.job(job_id) == before


def test_a_reset_whose_answer_was_lost_gives_the_same_answer(store: Store) -> None:
    job_id = ended_job(store, 1, 0, 1)
    first = store._database.write(lambda c: retry.reset_failed_rows(c, job_id, 1))
    assert first is not None
    assert len(first) == 2
    assert store._database.write(lambda c: retry.reset_failed_rows(c, job_id, 1)) is None
    assert store._database.read(lambda c: retry.num_reopened(c, job_id, 1)) == 2
    assert store.job(job_id).generation == 1


def test_a_job_that_has_not_ended_is_not_retried(store: Store) -> None:
    job_id = make_job(store, 1).job_id
    with pytest.raises(JobStateError, match="queued"):
        store.reset_failed_rows(job_id)
    lease = claim_first(store)
    store.commit_shard(lease, make_result(lease, failed=1))
    with pytest.raises(JobStateError, match="in_progress"):
        store.reset_failed_rows(job_id)
    end(store, job_id)
    store.reset_failed_rows(job_id)
    with pytest.raises(JobStateError, match="queued"):
        store.reset_failed_rows(job_id)
    with pytest.raises(NotFoundError):
        store.reset_failed_rows("job-x")


def test_an_abandoned_job_has_nothing_to_retry(store: Store) -> None:
    job_id = make_job(store, 2).job_id
    store.abandon_job(job_id, "output_removed", "its output was removed")
    with pytest.raises(JobStateError, match="its output was removed"):
        store.reset_failed_rows(job_id)


def test_an_output_that_belongs_to_a_newer_job_is_left_alone(store: Store) -> None:
    job_id = ended_job(store, 1)
    make_job(store, 1, job_id="job-z")
    with pytest.raises(JobStateError, match="job-z"):
        store.reset_failed_rows(job_id)


def test_a_cancelled_job_goes_on_where_it_was_stopped(store: Store) -> None:
    job_id = make_job(store, 3).job_id
    for cancelled in (0, 4):
        lease = claim_first(store)
        store.commit_shard(lease, make_result(lease, cancelled=cancelled))
    store.cancel(job_id)
    assert close_all(store, job_id, ShardState.CANCELLED) == 1
    assert end(store, job_id).status is JobStatus.CANCELLED
    assert store.reset_failed_rows(job_id) == 2
    commit_all(store, job_id)
    info = end(store, job_id)
    assert (info.status, info.rows) == (JobStatus.COMPLETED, RowCounts(total=30, completed=30))


def test_an_expired_job_has_all_the_time_of_the_world(store: Store) -> None:
    job_id = make_job(store, 2, expires_in_s=PAST).job_id
    assert store.available_shards(10) == []
    (first, reason), second = store.due_for_closing()
    for (shard_id, _), cancelled in (((first, reason), 0), (second, SHARD_ROWS)):
        lease = store.claim_for_close(shard_id, reason, "closer")
        assert lease is not None
        store.commit_shard(lease, make_result(lease, cancelled=cancelled))
    assert end(store, job_id).status is JobStatus.EXPIRED
    assert store.reset_failed_rows(job_id) == 1
    assert states(store, job_id) == {ShardState.COMMITTED: 1, ShardState.AVAILABLE: 1}, "every row of one was answered"
    commit_all(store, job_id)
    assert end(store, job_id).status is JobStatus.COMPLETED


def test_a_failed_job_may_run_again(store: Store) -> None:
    job_id = make_job(store, 2, max_failures=1).job_id
    for lease in [claim_first(store), claim_first(store)]:
        store.release(lease, failed=True, progressed=False)
    assert close_all(store, job_id, ShardState.DISCARDED) == 2
    assert end(store, job_id).error_code == "every_shard_discarded"
    assert store.reset_failed_rows(job_id) == 2
    info = store.job(job_id)
    assert (info.error_code, info.error_message) == (None, None)
    assert len(store.available_shards(10)) == 2, "with the whole failure budget"


def test_a_retry_that_is_cancelled_is_closed_over_the_part_that_stands(store: Store) -> None:
    job_id = ended_job(store, 3)
    store.reset_failed_rows(job_id)
    store.cancel(job_id)
    ((shard_id, reason),) = store.due_for_closing()
    lease = store.claim_for_close(shard_id, reason, "closer")
    assert lease is not None
    assert (lease.close_as, lease.replaces_etag) == (ShardState.CANCELLED, "etag-0")
    store.commit_shard(lease, make_result(lease, failed=3, etag="etag-0"))
    assert end(store, job_id).rows == RowCounts(total=10, completed=7, failed=3)


@pytest.mark.parametrize(
    "values",
    [
        {"generation": 1},  # and no part to replace
        {"generation": -1},
        {"part_uri": "/p", "part_etag": "e"},  # a part, yet neither terminal nor retried
    ],
)
def test_the_database_refuses_impossible_retries(store: Store, values: dict[str, object]) -> None:
    make_job(store, 1)
    with pytest.raises(IntegrityError):
        store._database.write(lambda c: c.execute(update(shards).values(**values)))
