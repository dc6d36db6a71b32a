"""What every database behind `Store` must do; the `store` fixture is one after the other."""

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import insert, text, update
from sqlalchemy.exc import IntegrityError
from tests.contract.store_jobs import (
    PAST,
    claim_first,
    close_all,
    commit_all,
    make_job,
    make_ranges,
    make_result,
    make_spec,
    states,
)

from nightmill.errors import FencedError, JobStateError, NotFoundError
from nightmill.records import (
    JobOptions,
    JobSpec,
    ModelSpec,
    RowCounts,
    ShardLease,
    ShardProgress,
    SourceFile,
    TokenCounts,
)
from nightmill.sampling import SamplingParams
from nightmill.schema import outbox, shards
from nightmill.states import JobStatus, ShardState, Tier
from nightmill.store import Store, leases

# Creating and reading


def test_a_job_comes_back_as_the_records_it_was_made_of(store: Store) -> None:
    spec = JobSpec(
        inputs=("/in/a.parquet", "/in/b.parquet"),
        output="/out/ünicode",
        model=ModelSpec(model="org/name", revision="main", dtype="float32", max_model_len=512),
        sampling=SamplingParams(temperature=0.7, stop=("\n", "é"), stop_token_ids=(1, 2), seed=2**64 - 1),
        seed=-3,
        system_prompt="Answer with\none word.",
        chat=False,
        strict=True,
    )
    options = JobOptions(tier=Tier.LOW, shard_rows=7, max_failed_rows=0, max_failures=2, idempotency_key="k")
    sources = [
        SourceFile(uri="/in/b.parquet", num_rows=20, size_bytes=2**40, etag=None),
        SourceFile(uri="/in/a.parquet", num_rows=10, size_bytes=5, etag="e"),
    ]
    info = store.create_job("job-1", spec, "d", options, sources, make_ranges(3), model_digest="sha256:m")

    assert info == store.job("job-1")
    assert (info.spec, info.options, info.spec_digest, info.model_digest) == (spec, options, "d", "sha256:m")
    assert store.sources("job-1") == sources
    assert info.status is JobStatus.QUEUED
    assert info.rows == RowCounts(total=30)
    assert info.num_shards == 3
    assert info.num_shards_by_state == {ShardState.AVAILABLE: 3}
    assert (info.started_at, info.finished_at, info.last_progress_at) == (None, None, None)


def test_times_are_aware_and_from_the_database(store: Store) -> None:
    info = make_job(store)
    assert info.created_at.tzinfo is UTC
    assert abs(datetime.now(UTC) - info.created_at) < timedelta(minutes=5)  # same machine in tests: the same clock


def test_creating_the_same_id_again_gives_the_job_that_is_there(store: Store) -> None:
    first = make_job(store, 3)
    again = make_job(store, 5, job_id=first.job_id)
    assert again == first
    assert len(store.jobs()) == 1


def test_an_idempotency_key_belongs_to_one_job(store: Store) -> None:
    first = make_job(store, idempotency_key="nightly-2026-11-29")
    second = make_job(store, idempotency_key="nightly-2026-11-29", output="/elsewhere")
    assert second.job_id == first.job_id
    assert store.job_for_key("nightly-2026-11-29") == first
    assert store.job_for_key("other") is None


def test_jobs_without_a_key_do_not_meet(store: Store) -> None:
    assert make_job(store).job_id != make_job(store).job_id


def test_a_job_has_shards(store: Store) -> None:
    with pytest.raises(ValueError, match="at least one"):
        make_job(store, 0)


def test_an_unknown_job_is_not_found(store: Store) -> None:
    with pytest.raises(NotFoundError, match="job-x"):
        store.job("job-x")
    with pytest.raises(NotFoundError):
        store.cancel("job-x")


def test_jobs_are_listed_newest_first_and_by_status(store: Store) -> None:
    a, b, c = (make_job(store, 1, job_id=f"job-{name}", output=f"/{name}") for name in "abc")
    store.cancel(b.job_id)
    assert [job.job_id for job in store.jobs()] == [c.job_id, b.job_id, a.job_id]
    assert [job.job_id for job in store.jobs(limit=1)] == [c.job_id]
    assert [job.job_id for job in store.jobs(status=JobStatus.CANCELLING)] == [b.job_id]


def test_the_newest_job_of_an_output_is_found(store: Store) -> None:
    make_job(store, job_id="job-a")
    make_job(store, job_id="job-b")
    found = store.job_for_output("/out")
    assert found is not None
    assert found.job_id == "job-b"
    assert store.job_for_output("/other") is None


# Claiming


def test_available_shards_come_by_tier_then_age_then_file_order(store: Store) -> None:
    jobs = {tier: make_job(store, 2, tier=tier).job_id for tier in (Tier.LOW, Tier.NORMAL)}
    jobs[Tier.HIGH] = make_job(store, 2, tier=Tier.HIGH, job_id="job-a").job_id
    later = make_job(store, 2, tier=Tier.HIGH, job_id="job-b").job_id  # perhaps in the same millisecond
    expected = [(job, i) for job in (jobs[Tier.HIGH], later, jobs[Tier.NORMAL], jobs[Tier.LOW]) for i in (0, 1)]
    leases_in_order = [store.claim(shard_id, "w") for shard_id in store.available_shards(100)]
    assert [(lease.job_id, lease.range.index) for lease in leases_in_order if lease is not None] == expected


def test_available_shards_can_be_limited_to_one_job(store: Store) -> None:
    make_job(store, 2)
    mine = make_job(store, 2)
    ids = store.available_shards(100, mine.job_id)
    assert len(ids) == 2
    assert len(store.available_shards(1, mine.job_id)) == 1
    lease = store.claim(ids[0], "w")
    assert lease is not None
    assert lease.job_id == mine.job_id


def test_a_claim_gives_the_range_and_starts_the_job(store: Store) -> None:
    job_id = make_job(store).job_id
    lease = claim_first(store)
    assert (lease.job_id, lease.attempt, lease.num_failures, lease.worker_id) == (job_id, 1, 0, "w1")
    assert lease.range == make_ranges(1)[0]
    assert lease.close_as is None
    info = store.job(job_id)
    assert info.status is JobStatus.IN_PROGRESS
    assert info.started_at is not None
    assert info.num_shards_by_state == {ShardState.AVAILABLE: 2, ShardState.LEASED: 1}
    assert store.has_live_leases(job_id)


@pytest.mark.parametrize("worker_id", ["w1", "w2"])
def test_a_live_lease_is_not_granted_again_not_even_to_its_owner(store: Store, worker_id: str) -> None:
    make_job(store, 1)
    lease = claim_first(store)
    assert store.claim(lease.shard_id, worker_id) is None
    assert store.available_shards(10) == []


def test_an_expired_lease_is_granted_only_after_it_was_taken_back(store: Store) -> None:
    job_id = make_job(store, 1).job_id
    lease = claim_first(store, ttl_s=PAST)
    assert not store.has_live_leases(job_id)
    assert store.claim(lease.shard_id, "w2") is None
    assert store.expire_leases() == 1
    again = store.claim(lease.shard_id, "w2")
    assert again is not None
    assert (again.attempt, again.num_failures) == (2, 1)


def test_there_is_no_claim_on_what_is_not_there(store: Store) -> None:
    assert store.claim(12345, "w1") is None


def test_a_claim_whose_answer_was_lost_is_repeated_with_the_same_result(store: Store) -> None:
    make_job(store, 1)
    (shard_id,) = store.available_shards(1)

    def claim(token: str) -> ShardLease | None:
        return store._database.write(lambda c: leases.claim(c, shard_id, "w1", 30.0, token))

    first = claim("token-a")
    assert first is not None
    assert claim("token-a") == first
    assert claim("token-b") is None


# Heartbeats


def test_a_heartbeat_renews_and_shows_progress(store: Store) -> None:
    job_id = make_job(store, 2).job_id
    lease = claim_first(store, ttl_s=PAST)
    progress = ShardProgress(
        attempt=1, rows_completed=4, rows_failed=1, rows_running=3, rows_durable=2, tokens=TokenCounts(prompt=9)
    )
    assert store.heartbeat("w1", {lease.shard_id: progress}) == frozenset()
    assert store.expire_leases() == 0
    info = store.job(job_id)
    assert info.rows == RowCounts(total=20, completed=4, failed=1)
    assert (info.rows_running, info.tokens.prompt) == (3, 9)
    assert info.last_progress_at is not None


def test_a_heartbeat_without_news_is_not_progress(store: Store) -> None:
    job_id = make_job(store, 1).job_id
    lease = claim_first(store)
    store.heartbeat("w1", {lease.shard_id: ShardProgress(attempt=1, rows_running=10)})
    assert store.job(job_id).last_progress_at is None


def test_a_heartbeat_tells_which_leases_are_lost(store: Store) -> None:
    make_job(store, 4)
    kept, expired, taken, done = (claim_first(store, "w1", ttl_s) for ttl_s in (30, PAST, PAST, 30))
    store.expire_leases()
    assert store.claim(taken.shard_id, "w2") is not None
    store.commit_shard(done, make_result(done))
    beat = {lease.shard_id: ShardProgress(attempt=1) for lease in (kept, expired, taken, done)}
    assert store.heartbeat("w1", beat | {999: ShardProgress(attempt=1)}) == {
        expired.shard_id,
        taken.shard_id,
        done.shard_id,
        999,
    }


def test_a_heartbeat_of_an_older_attempt_of_the_same_worker_renews_nothing(store: Store) -> None:
    make_job(store, 1)
    old = claim_first(store, "w1", PAST)
    store.expire_leases()
    new = claim_first(store, "w1", PAST)
    assert (old.shard_id, new.attempt) == (new.shard_id, 2)
    assert store.heartbeat("w1", {old.shard_id: ShardProgress(attempt=1)}) == {old.shard_id}
    assert store.expire_leases() == 1


def test_an_empty_heartbeat_is_fine(store: Store) -> None:
    assert store.heartbeat("w1", {}) == frozenset()


# Giving back, dying, and the failure budget


def reclaim(store: Store, lease: ShardLease, ttl_s: float = 30.0) -> ShardLease:
    again = store.claim(lease.shard_id, "w1", ttl_s)
    assert again is not None
    return again


@pytest.mark.parametrize(
    ("failed", "progressed", "expected"), [(True, False, 2), (True, True, 0), (False, False, 1), (False, True, 0)]
)
def test_only_a_failure_without_progress_is_charged(
    store: Store, failed: bool, progressed: bool, expected: int
) -> None:
    make_job(store, 1)
    first = claim_first(store)
    assert store.release(first, failed=True, progressed=False)
    second = reclaim(store, first)
    assert second.num_failures == 1
    assert store.release(second, failed=failed, progressed=progressed)
    assert reclaim(store, first).num_failures == expected


def test_a_death_after_durable_rows_is_not_charged(store: Store) -> None:
    make_job(store, 1)
    lease = claim_first(store)
    for durable, expected in ((3, 0), (3, 1), (2, 2), (4, 0)):
        store.heartbeat("w1", {lease.shard_id: ShardProgress(attempt=lease.attempt, rows_durable=durable)}, PAST)
        assert store.expire_leases() == 1
        lease = reclaim(store, lease)
        assert lease.num_failures == expected


@pytest.mark.parametrize("heir", ["w1", "w2"])
def test_a_lost_lease_cannot_be_given_back(store: Store, heir: str) -> None:
    make_job(store, 1)
    old = claim_first(store, "w1", PAST)
    store.expire_leases()
    new = store.claim(old.shard_id, heir)
    assert new is not None
    assert not store.release(old, failed=True, progressed=False)
    assert store.heartbeat(heir, {new.shard_id: ShardProgress(attempt=2)}) == frozenset()


def test_leases_of_the_dead_are_taken_back_at_once(store: Store) -> None:
    job_id = make_job(store, 3).job_id
    for worker_id in ("dead-1", "alive", "dead-2"):
        claim_first(store, worker_id)
    assert store.release_dead(["dead-1", "dead-2", "unknown"]) == 2
    assert states(store, job_id) == {ShardState.AVAILABLE: 2, ShardState.LEASED: 1}
    assert store.release_dead([]) == 0


def test_a_used_up_budget_discards_the_shard_through_a_closer(store: Store) -> None:
    job_id = make_job(store, 2, max_failures=2).job_id
    lease = claim_first(store)
    assert store.release(lease, failed=True, progressed=False)
    assert store.due_for_closing() == []
    assert store.release(reclaim(store, lease), failed=True, progressed=False)

    assert store.due_for_closing() == [(lease.shard_id, ShardState.DISCARDED)]
    assert store.claim(lease.shard_id, "w1") is None
    assert lease.shard_id not in store.available_shards(10)

    closing = store.claim_for_close(lease.shard_id, ShardState.DISCARDED, "closer")
    assert closing is not None
    assert (closing.attempt, closing.close_as, closing.worker_id) == (3, ShardState.DISCARDED, "closer")
    assert store.claim_for_close(lease.shard_id, ShardState.DISCARDED, "closer") is None
    assert store.due_for_closing() == []
    store.commit_shard(closing, make_result(closing, failed=10))
    assert states(store, job_id) == {ShardState.AVAILABLE: 1, ShardState.DISCARDED: 1}


def test_a_closer_that_dies_is_followed_by_another(store: Store) -> None:
    make_job(store, 1, max_failures=1)
    lease = claim_first(store)
    store.release(lease, failed=True, progressed=False)
    closing = store.claim_for_close(lease.shard_id, ShardState.DISCARDED, "closer", PAST)
    assert closing is not None
    assert store.expire_leases() == 1
    assert store.due_for_closing() == [(lease.shard_id, ShardState.DISCARDED)]
    with pytest.raises(FencedError):
        store.commit_shard(closing, make_result(closing, failed=10))


@pytest.mark.parametrize("reason", [ShardState.DISCARDED, ShardState.CANCELLED, ShardState.EXPIRED])
def test_a_healthy_shard_is_not_closed(store: Store, reason: ShardState) -> None:
    make_job(store, 1)
    (shard_id,) = store.available_shards(1)
    assert store.claim_for_close(shard_id, reason, "closer") is None
    with pytest.raises(ValueError, match="committed"):
        store.claim_for_close(shard_id, ShardState.COMMITTED, "closer")


# Committing


def test_a_commit_is_final_and_counted(store: Store) -> None:
    job_id = make_job(store, 2).job_id
    lease = claim_first(store)
    result = make_result(lease, failed=2, rows_resumed=4, rows_recomputed=1)
    store.commit_shard(lease, result)
    info = store.job(job_id)
    assert info.rows == RowCounts(total=20, completed=8, failed=2)
    assert info.tokens == TokenCounts(prompt=100, completion=20, cached=50)
    assert info.error_codes == {"null_prompt": 2}
    assert (info.rows_resumed, info.rows_recomputed) == (4, 1)
    (committed,) = store.shard_results(job_id)
    assert (committed.shard_id, committed.range, committed.attempt) == (lease.shard_id, lease.range, 1)
    assert (committed.state, committed.result) == (ShardState.COMMITTED, result)
    assert store.claim(lease.shard_id, "w1") is None


def test_a_commit_overrules_what_heartbeats_said(store: Store) -> None:
    job_id = make_job(store, 1).job_id
    lease = claim_first(store)
    store.heartbeat("w1", {lease.shard_id: ShardProgress(attempt=1, rows_completed=7, rows_failed=3, rows_running=5)})
    store.commit_shard(lease, make_result(lease))
    info = store.job(job_id)
    assert (info.rows, info.rows_running) == (RowCounts(total=10, completed=10), 0)


def test_results_are_in_file_order(store: Store) -> None:
    job_id = make_job(store, 3).job_id
    for lease in reversed([claim_first(store) for _ in range(3)]):
        store.commit_shard(lease, make_result(lease))
    assert [shard.range.index for shard in store.shard_results(job_id)] == [0, 1, 2]


@pytest.mark.parametrize("heir", ["w1", "w2"])
def test_a_stale_attempt_commits_nothing(store: Store, heir: str) -> None:
    job_id = make_job(store, 1).job_id
    zombie = claim_first(store, "w1", PAST)
    store.expire_leases()
    for _ in ("available", "leased", "committed"):
        with pytest.raises(FencedError, match="attempt 1"):
            store.commit_shard(zombie, make_result(zombie, failed=10, etag="zombie"))
        if ids := store.available_shards(1):
            lease = store.claim(ids[0], heir)
        elif states(store, job_id) == {ShardState.LEASED: 1}:
            assert lease is not None
            store.commit_shard(lease, make_result(lease))
    with pytest.raises(FencedError):
        store.commit_shard(zombie, make_result(zombie))  # not even when the heir adopted its part
    (committed,) = store.shard_results(job_id)
    assert (committed.attempt, committed.result.part_etag) == (2, "etag")
    assert store.job(job_id).rows.failed == 0


def test_a_commit_on_an_expired_lease_that_nobody_took_is_good(store: Store) -> None:
    job_id = make_job(store, 1).job_id
    lease = claim_first(store, ttl_s=PAST)
    store.commit_shard(lease, make_result(lease))
    assert states(store, job_id) == {ShardState.COMMITTED: 1}


def test_a_commit_whose_answer_was_lost_may_be_repeated_but_not_changed(store: Store) -> None:
    make_job(store, 1)
    lease = claim_first(store)
    store.commit_shard(lease, make_result(lease))
    store.commit_shard(lease, make_result(lease))
    with pytest.raises(FencedError):
        store.commit_shard(lease, make_result(lease, etag="other"))


@pytest.mark.parametrize(
    "rows", [RowCounts(total=10, completed=9), RowCounts(total=9, completed=9), RowCounts(total=10, completed=11)]
)
def test_a_commit_that_does_not_add_up_is_refused(store: Store, rows: RowCounts) -> None:
    make_job(store, 1)
    lease = claim_first(store)
    with pytest.raises(ValueError, match="10 rows"):
        store.commit_shard(lease, make_result(lease, rows=rows))
    store.commit_shard(lease, make_result(lease))


# Cancel, fail, expire


def test_cancel_stops_new_claims_and_lets_closers_in(store: Store) -> None:
    job_id = make_job(store, 3).job_id
    finishing = claim_first(store)
    stopping = claim_first(store, "w2")
    assert store.stop_requested([job_id]) == frozenset()

    assert store.cancel(job_id).status is JobStatus.CANCELLING
    assert store.cancel(job_id).status is JobStatus.CANCELLING
    assert store.stop_requested([job_id]) == {job_id}
    assert store.available_shards(10) == []
    assert len(store.due_for_closing()) == 1, "what is leased is its worker's until it lets go"

    store.commit_shard(finishing, make_result(finishing))
    store.release(stopping, failed=False, progressed=True)
    assert store.claim(stopping.shard_id, "w1") is None
    assert not store.begin_finalize(job_id)
    assert close_all(store, job_id, ShardState.CANCELLED) == 2

    assert store.begin_finalize(job_id)
    info = store.complete_job(job_id)
    assert info.status is JobStatus.CANCELLED
    assert info.finished_at is not None
    assert info.rows == RowCounts(total=30, completed=10, cancelled=20)
    assert info.num_shards_by_state == {ShardState.COMMITTED: 1, ShardState.CANCELLED: 2}
    assert store.cancel(job_id) == info
    assert store.stop_requested([job_id]) == {job_id}


def test_case_I028_cancel_works_without_an_owner(store: Store) -> None:
    job_id = make_job(store, 1).job_id
    claim_first(store, "killed", PAST)
    store.cancel(job_id)
    store.expire_leases()
    assert close_all(store, job_id, ShardState.CANCELLED) == 1
    assert store.finalizable_jobs() == [job_id]
    assert store.complete_job(job_id).status is JobStatus.CANCELLED


def test_a_job_that_ended_cannot_be_cancelled(store: Store) -> None:
    job_id = make_job(store, 1).job_id
    commit_all(store, job_id)
    assert store.begin_finalize(job_id)
    with pytest.raises(JobStateError, match="finalizing"):
        store.cancel(job_id)
    store.complete_job(job_id)
    with pytest.raises(JobStateError, match="completed"):
        store.cancel(job_id)


def test_unknown_jobs_must_stop(store: Store) -> None:
    job_id = make_job(store, 1).job_id
    assert store.stop_requested([job_id, "job-gone"]) == {"job-gone"}
    assert store.stop_requested([]) == frozenset()


def test_a_failing_job_keeps_what_is_finished(store: Store) -> None:
    job_id = make_job(store, 3).job_id
    lease = claim_first(store)
    store.commit_shard(lease, make_result(lease, failed=6))
    store.fail_job(job_id, "error_budget_exceeded", "6 rows failed, 5 are allowed")
    store.fail_job(job_id, "other", "too late")
    assert store.stop_requested([job_id]) == {job_id}
    assert store.available_shards(10) == []
    assert close_all(store, job_id, ShardState.CANCELLED) == 2
    assert store.begin_finalize(job_id)
    info = store.complete_job(job_id)
    assert (info.status, info.error_code) == (JobStatus.FAILED, "error_budget_exceeded")
    assert info.rows == RowCounts(total=30, completed=4, failed=6, cancelled=20)


def test_an_expired_job_says_so(store: Store) -> None:
    job_id = make_job(store, 2, expires_in_s=PAST).job_id
    assert store.available_shards(10) == []
    assert store.stop_requested([job_id]) == {job_id}
    assert close_all(store, job_id, ShardState.EXPIRED) == 2
    assert store.begin_finalize(job_id)
    assert store.complete_job(job_id).status is JobStatus.EXPIRED


def test_a_job_that_expires_later_runs(store: Store) -> None:
    job_id = make_job(store, 2, expires_in_s=3600).job_id
    assert len(store.available_shards(10)) == 2
    assert store.due_for_closing() == []
    assert store.stop_requested([job_id]) == frozenset()


# Ending


def test_finalizing_waits_for_every_shard_and_survives_a_crash(store: Store) -> None:
    job_id = make_job(store, 2).job_id
    lease = claim_first(store)
    store.commit_shard(lease, make_result(lease))
    assert not store.begin_finalize(job_id)
    assert store.finalizable_jobs() == []
    commit_all(store, job_id)
    assert store.finalizable_jobs() == [job_id]
    assert store.begin_finalize(job_id)
    assert store.job(job_id).status is JobStatus.FINALIZING
    assert store.finalizable_jobs() == [job_id], "whoever comes after a crash must find it"
    assert store.begin_finalize(job_id)
    info = store.complete_job(job_id)
    assert info.status is JobStatus.COMPLETED
    assert store.complete_job(job_id) == info
    assert not store.begin_finalize(job_id)
    assert store.finalizable_jobs() == []


def test_case_I033_a_job_whose_rows_all_failed_is_completed_with_counts(store: Store) -> None:
    job_id = make_job(store, 1).job_id
    lease = claim_first(store)
    store.commit_shard(lease, make_result(lease, failed=10))
    store.begin_finalize(job_id)
    info = store.complete_job(job_id)
    assert (info.status, info.rows) == (JobStatus.COMPLETED, RowCounts(total=10, failed=10))


def test_a_job_whose_shards_were_all_discarded_has_failed(store: Store) -> None:
    job_id = make_job(store, 2, max_failures=1).job_id
    for lease in [claim_first(store), claim_first(store)]:
        store.release(lease, failed=True, progressed=False)
    assert close_all(store, job_id, ShardState.DISCARDED) == 2
    store.begin_finalize(job_id)
    info = store.complete_job(job_id)
    assert (info.status, info.error_code) == (JobStatus.FAILED, "every_shard_discarded")


def test_illegal_ends_are_refused(store: Store) -> None:
    job_id = make_job(store, 1).job_id
    for status in (JobStatus.COMPLETED, JobStatus.CANCELLED, JobStatus.EXPIRED):
        with pytest.raises(JobStateError, match="queued"):
            store.complete_job(job_id, status)
    with pytest.raises(ValueError, match="does not end"):
        store.complete_job(job_id, JobStatus.IN_PROGRESS)
    store.cancel(job_id)
    with pytest.raises(JobStateError, match="cancelling"):
        store.complete_job(job_id)


@pytest.mark.parametrize(("cancelled", "status"), [(False, JobStatus.FAILED), (True, JobStatus.CANCELLED)])
def test_an_abandoned_job_ends_at_once_and_its_counts_add_up(store: Store, cancelled: bool, status: JobStatus) -> None:
    job_id = make_job(store, 2).job_id
    lease = claim_first(store)
    store.heartbeat("w1", {lease.shard_id: ShardProgress(attempt=1, rows_completed=4)})
    if cancelled:
        store.cancel(job_id)
    info = store.abandon_job(job_id, "output_removed", "gone")
    assert (info.status, info.error_code) == (status, "output_removed")
    assert info.rows == RowCounts(total=20, completed=4, cancelled=16)
    assert store.stop_requested([job_id]) == {job_id}
    assert store.abandon_job(job_id, "again", "again") == info


# What the database itself refuses


@pytest.mark.parametrize(
    "values",
    [
        {"state": "nonsense"},
        {"state": "leased"},  # by nobody
        {"worker_id": "w1"},  # available, yet held
        {"state": "committed"},  # without a part
        {"state": "committed", "part_uri": "/p", "rows_completed": 9},  # a row is missing
        {"close_as": "committed"},
        {"row_end": 0},
    ],
)
def test_the_database_refuses_impossible_shards(store: Store, values: dict[str, object]) -> None:
    make_job(store, 1)
    with pytest.raises(IntegrityError):
        store._database.write(lambda c: c.execute(update(shards).values(**values)))


def test_the_database_refuses_impossible_jobs_and_orphans(store: Store) -> None:
    make_job(store, 1)
    with pytest.raises(IntegrityError):
        store._database.write(lambda c: c.execute(text("UPDATE jobs SET status = 'done'")))
    with pytest.raises(IntegrityError):
        store._database.write(
            lambda c: c.execute(insert(outbox).values(shard_id=999, tier="low", created_at=datetime.now(UTC)))
        )


def test_a_failed_transaction_leaves_nothing(store: Store) -> None:
    twice = [*make_ranges(1), *make_ranges(1)]
    source = SourceFile(uri="/in/a.parquet", num_rows=20, size_bytes=1)
    with pytest.raises(IntegrityError):
        store.create_job("job-1", make_spec(), "digest", JobOptions(), [source], twice)
    assert store.jobs() == []


# What a fleet asks


def test_available_shards_can_be_limited_to_a_tier(store: Store) -> None:
    for tier in Tier:
        make_job(store, 2, tier=tier)
    everything = store.available_shards(100)
    by_tier = [store.available_shards(100, tier=tier) for tier in (Tier.HIGH, Tier.NORMAL, Tier.LOW)]
    assert [len(ids) for ids in by_tier] == [2, 2, 2]
    assert [shard_id for ids in by_tier for shard_id in ids] == everything
    assert store.available_shards(3) == everything[:3]


def test_a_shard_without_budget_does_not_hide_those_behind_it(store: Store) -> None:
    job_id = make_job(store, 3, max_failures=1).job_id
    first = claim_first(store)
    store.release(first, failed=True, progressed=False)
    ids = store.available_shards(1, job_id)
    assert len(ids) == 1
    assert ids[0] != first.shard_id
    assert store.jobs_to_close() == [job_id]


def test_a_closer_keeps_its_lease_without_touching_what_is_shown(store: Store) -> None:
    job_id = make_job(store, 1).job_id
    lease = claim_first(store, ttl_s=PAST)
    store.heartbeat("w1", {lease.shard_id: ShardProgress(attempt=1, rows_completed=4, rows_running=2)}, PAST)
    before = store.job(job_id)
    assert store.renew(lease)
    assert store.expire_leases() == 0
    assert store.job(job_id) == before
    store.release(lease, failed=False, progressed=False)
    assert not store.renew(lease)


def test_leases_are_taken_back_in_bounded_bites(store: Store) -> None:
    make_job(store, 5)
    for _ in range(5):
        claim_first(store, ttl_s=PAST)
    assert [store.expire_leases(limit=2) for _ in range(4)] == [2, 2, 1, 0]


def test_numbers_beyond_32_bits_arrive(store: Store) -> None:
    job_id = make_job(store, 1).job_id
    lease = claim_first(store)
    tokens = TokenCounts(prompt=2**40, completion=2**33, cached=2**31)
    store.heartbeat("w1", {lease.shard_id: ShardProgress(attempt=1, tokens=tokens)})
    assert store.job(job_id).tokens == tokens


def test_the_lock_of_the_janitor_can_be_had_again(store: Store) -> None:
    for _ in range(3):
        with store.janitor_lock() as granted:
            assert granted


def test_an_input_is_given_up_when_its_shards_have_failed_too_often_together(store: Store) -> None:
    job = make_job(store, 4)
    other = make_job(store, 2, output="/other")
    source_file = "in"
    for turn in range(job.options.max_failures):
        assert store.give_up_source(job.job_id, source_file) == 0
        lease = store.claim(store.available_shards(10, job.job_id)[turn % 3], "w")
        assert lease is not None
        source_file = lease.range.source_file
        store.release(lease, failed=True, progressed=False)
    assert store.give_up_source(job.job_id, "another file") == 0
    assert store.give_up_source(job.job_id, source_file) == 4
    assert store.give_up_source(job.job_id, source_file) == 0
    assert store.available_shards(10, job.job_id) == []
    assert [reason for _, reason in store.due_for_closing(10)] == [ShardState.DISCARDED] * 4
    assert len(store.available_shards(10, other.job_id)) == 2


def test_a_model_that_is_refused_fails_a_job_only_before_anybody_has_begun_it(store: Store) -> None:
    waiting, begun = make_job(store, 1).job_id, make_job(store, 2, output="/other").job_id
    assert store.claim(store.available_shards(1, begun)[0], "w") is not None
    refused = [store.refuse_model(waiting, 3, "model_unavailable", f"try {i}") for i in range(4)]
    assert refused == [False, False, True, False]
    assert store.job(waiting).error_message == "try 2"
    assert not any(store.refuse_model(begun, 1, "model_unavailable", "no") for _ in range(4))
    assert store.job(begun).error_code is None


def test_what_was_planned_of_the_inputs_is_kept(store: Store) -> None:
    assert store.source_schema(make_job(store, 1).job_id) is None
    source = SourceFile(uri="in", num_rows=10, size_bytes=1)
    ranges = make_ranges(1)
    store.create_job("job-s", make_spec(), "digest", JobOptions(), [source], ranges, source_schema="c2NoZW1h")
    assert store.source_schema("job-s") == "c2NoZW1h"
