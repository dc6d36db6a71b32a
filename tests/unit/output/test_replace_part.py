"""`nightmill retry`: failed rows get new answers, everything else of the part stays bit for bit."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.contract.s3_stores import use_store
from tests.services.servers import S3Bucket
from tests.unit.output.output_jobs import DIGEST, STORAGE, SmallJob, answer, committed
from tests.unit.rows.row_inputs import make_spec, write

import nightmill.output.part
from nightmill.errors import RowErrorCode, StorageError
from nightmill.output import OutputFolder, PartInfo, finalize_output, publish_part, read_part, replace_part, write_part
from nightmill.records import Completion, RowCounts, ShardRange
from nightmill.rows import InputRow
from nightmill.storage import LocalStorage, PreconditionFailedError, SourceChangedError, Storage, open_storage

FAILING = {"prompt": [f"p{n}" for n in range(6)], "custom_id": ["a", None, "c", "d", "e", "f"], "n": list(range(6))}


def flaky(*failing: int) -> Callable[[InputRow], Completion]:
    """Answers that differ in everything a row can have; these rows fail."""

    def make(row: InputRow) -> Completion:
        if row.row_index in failing:
            return Completion(
                row_index=row.row_index,
                custom_id=row.custom_id,
                error_code=RowErrorCode.ENGINE_ERROR.value,
                error_message="it went wrong",
                attempts=2,
            )
        return answer(row, seed=2**64 - 1 - row.row_index, text=f"\u00e4 {row.row_index}\n", attempts=1 + row.row_index)

    return make


def job_of(tmp_path: Path, **fields: Any) -> SmallJob:
    spec = make_spec(write(tmp_path / "in" / "x.parquet", FAILING), output=tmp_path / "out", **fields)
    return SmallJob(spec)


def retried(
    job: SmallJob, part: PartInfo, *rows: int, storage: Storage = STORAGE, attempt: int = 2, **fields: Any
) -> PartInfo:
    (shard,) = job.shards
    new = [c for c in job.completions(shard, lambda r: answer(r, text="now", **fields)) if c.row_index in rows]
    return replace_part(
        storage,
        job.folder,
        shard,
        {c.row_index: c for c in new},
        etag=part.etag,
        spec=job.spec,
        spec_digest=DIGEST,
        source_schema=job.source_schema,
        model="another name",
        attempt=attempt,
    )


def rows_of(part: PartInfo) -> list[dict[str, Any]]:
    return list(pq.read_table(part.uri).to_pylist())


@pytest.mark.parametrize("prefix", ["", "nm_"])
def test_failed_rows_are_answered_and_the_others_stay(prefix: str, tmp_path: Path) -> None:
    job = job_of(tmp_path, output_prefix=prefix)
    (shard,) = job.shards
    old = job.part(shard, job.completions(shard, flaky(1, 4)))
    before = rows_of(old)
    new = retried(job, old, 1, 4)
    after = rows_of(new)
    assert (old.rows, new.rows) == (
        RowCounts(total=6, completed=4, failed=2),
        RowCounts(total=6, completed=6),
    )
    assert new.error_codes == {}
    assert new.tokens.completion == old.tokens.completion + 2 * 4
    for index in (0, 2, 3, 5):
        assert after[index] == before[index]
    for index in (1, 4):
        assert after[index][f"{prefix}completion"] == "now"
        assert after[index][f"{prefix}model"] == "another name"
        assert after[index]["n"] == index
    assert not new.adopted
    assert new.etag != old.etag
    assert pq.read_schema(new.uri).equals(job_schema(job))


def job_schema(job: SmallJob) -> pa.Schema:
    from nightmill.rows import output_schema

    return output_schema(job.source_schema, job.spec)


def test_a_row_that_was_answered_is_never_replaced(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    (shard,) = job.shards
    old = job.part(shard, job.completions(shard, flaky(1)))
    before = rows_of(old)
    new = retried(job, old, 0, 1, 2, 3, 4, 5)
    assert [i for i, (a, b) in enumerate(zip(before, rows_of(new), strict=True)) if a != b] == [1]


def test_a_row_that_fails_again_and_one_that_did_not_run(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    (shard,) = job.shards
    old = job.part(shard, job.completions(shard, flaky(1, 2, 4)))
    fields = {"text": None, "finish_reason": None, "error_code": "request_timeout", "error_message": "slow"}
    new_rows = {c.row_index: replace(c, **fields) for c in job.completions(shard) if c.row_index == 1}  # type: ignore[arg-type]
    new_rows |= {c.row_index: c for c in job.completions(shard) if c.row_index == 2}
    new = replace_part(
        STORAGE, job.folder, shard, new_rows, etag=old.etag, spec=job.spec, spec_digest=DIGEST,
        source_schema=job.source_schema, model="fake",
    )  # fmt: skip
    assert new.error_codes == {"engine_error": 1, "request_timeout": 1}
    assert [row["error_code"] for row in rows_of(new)] == [None, "request_timeout", None, None, "engine_error", None]


def test_nothing_to_replace_writes_nothing(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    (shard,) = job.shards
    old = job.part(shard, job.completions(shard, flaky(1)))
    assert retried(job, old).etag == old.etag
    assert retried(job, old, 0, 3).etag == old.etag


def test_after_a_crash_behind_the_put_the_replacement_is_adopted(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    (shard,) = job.shards
    old = job.part(shard, job.completions(shard, flaky(1, 4)))
    new = retried(job, old, 1, 4)
    again = retried(job, old, 1, 4)
    assert again == replace(new, adopted=True, replaces=old.etag)
    # The next retry begins from that one.
    assert retried(job, new).etag == new.etag


def test_two_attempts_of_one_retry_end_with_one_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A zombie has read the old part, and its successor replaces it before the zombie writes."""
    job = job_of(tmp_path)
    (shard,) = job.shards
    old = job.part(shard, job.completions(shard, flaky(1, 4)))
    real = nightmill.output.part._verify
    winners: list[PartInfo] = []

    def meanwhile(*arguments: Any) -> None:
        real(*arguments)
        monkeypatch.setattr(nightmill.output.part, "_verify", real)
        winners.append(retried(job, old, 1, 4, attempt=3))

    monkeypatch.setattr(nightmill.output.part, "_verify", meanwhile)
    zombie = retried(job, old, 1, attempt=2)
    assert zombie == replace(winners[0], adopted=True, replaces=old.etag)
    assert pq.read_table(old.uri).column("error_code").null_count == 6


def test_a_part_that_somebody_else_changed_is_refused(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    (shard,) = job.shards
    old = job.part(shard, job.completions(shard, flaky(1)))
    Path(old.uri).unlink()
    other = job.part(shard, job.completions(shard, flaky(1, 2)))
    with pytest.raises(PreconditionFailedError, match=r"part-00000\.parquet is not the part that was committed"):
        retried(job, old, 1)
    assert rows_of(other) == rows_of(job.part(shard))
    Path(old.uri).unlink()
    with pytest.raises(StorageError, match="is gone"):
        retried(job, old, 1)


def test_a_source_changed_since_is_told_and_the_old_part_stands(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    (shard,) = job.shards
    old = job.part(shard, job.completions(shard, flaky(1)))
    data = Path(old.uri).read_bytes()
    changed = FAILING | {"custom_id": ["a", None, "c", "d", "x", "f"]}
    write(Path(job.spec.inputs[0]), changed)
    with pytest.raises(StorageError, match=r"row 4 of .* has the id 'x', but was answered as 'e'"):
        retried(job, old, 1)
    assert Path(old.uri).read_bytes() == data


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=20)


@given(
    failing=st.sets(st.integers(0, 5)),
    again=st.sets(st.integers(0, 5)),
    answers=st.lists(st.tuples(texts, st.integers(0, 2**64 - 1), st.none() | texts), min_size=6, max_size=6),
)
def test_reading_a_part_gives_what_was_written(
    failing: set[int], again: set[int], answers: list[tuple[str, int, str | None]], tmp_path_factory: Any
) -> None:
    job = job_of(tmp_path_factory.mktemp("job"))
    (shard,) = job.shards
    make = flaky(*failing)

    def varied(row: InputRow) -> Completion:
        text, seed, _ = answers[row.row_index]
        made = make(row)
        return made if made.error_code else replace(made, text=text, seed=seed)

    written = job.completions(shard, varied)
    old = job.part(shard, written)
    assert [row.completion for row in read_part(STORAGE, old.uri, shard, spec=job.spec).values()] == written
    new = retried(job, old, *again)
    changed = [i for i, (a, b) in enumerate(zip(rows_of(old), rows_of(new), strict=True)) if a != b]
    assert set(changed) <= failing & again
    assert new.rows.failed == len(failing - again)


# Stores that cannot create atomically.


class UnconditionalStorage(LocalStorage):
    """A named fake: a disk that claims to overwrite whatever is there, as old S3 gateways do."""

    def creates_atomically(self, folder: str) -> bool:
        return False


UNCONDITIONAL = UnconditionalStorage()


def unconditional_part(job: SmallJob, shard: ShardRange, attempt: int, *failing: int) -> PartInfo:
    rows = job.completions(shard, flaky(*failing))
    return write_part(
        UNCONDITIONAL, job.folder, shard, {row.row_index: row for row in rows}, spec=job.spec, spec_digest=DIGEST,
        source_schema=job.source_schema, model="fake", attempt=attempt,
    )  # fmt: skip


def final_parts(folder: OutputFolder) -> list[str]:
    return sorted(str(path) for path in Path(folder.root).glob("*.parquet"))


def test_without_atomic_creation_only_the_committed_attempt_is_published(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    (shard,) = job.shards
    zombie, winner = unconditional_part(job, shard, 1, 1, 2, 3), unconditional_part(job, shard, 2, 1)
    assert final_parts(job.folder) == []
    assert zombie.uri == winner.uri == job.folder.part(0)
    publish_part(UNCONDITIONAL, job.folder, 0, 2)
    assert pq.read_table(winner.uri).column("error_code").null_count == 5
    new = retried(job, winner, 1, storage=UNCONDITIONAL, attempt=3)
    assert pq.read_table(winner.uri).column("error_code").null_count == 5, "not before the commit"
    publish_part(UNCONDITIONAL, job.folder, 0, 3)
    assert pq.read_table(winner.uri).column("error_code").null_count == 6
    assert new.rows.completed == 6


def test_a_winner_that_died_before_it_published_is_published_at_the_end(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    (shard,) = job.shards
    unconditional_part(job, shard, 1, 1, 2)
    winner = replace(committed(shard, unconditional_part(job, shard, 2, 1)), attempt=2)
    finalize_output(UNCONDITIONAL, job.folder, [winner], spec=job.spec, spec_digest=DIGEST)
    assert final_parts(job.folder) == [job.folder.part(0)]
    assert pq.read_table(job.folder.part(0)).column("error_code").null_count == 5
    assert not list(Path(job.folder.root).glob("_nightmill/*/shard-*")), "attempts' parts are gone"
    # Again, as after a crash: nothing is there to publish, and nothing is missing.
    finalize_output(UNCONDITIONAL, job.folder, [winner], spec=job.spec, spec_digest=DIGEST)


def test_a_retry_on_s3_is_one_conditional_write(s3_server: S3Bucket, tmp_path: Path, monkeypatch: Any) -> None:
    use_store(monkeypatch, s3_server)
    root = f"s3://{s3_server.bucket}/out"
    storage = open_storage(root)
    spec = make_spec(write(tmp_path / "x.parquet", FAILING), output=root)
    job = SmallJob(spec)
    (shard,) = job.shards
    rows = {row.row_index: row for row in job.completions(shard, flaky(1, 4))}
    common: dict[str, Any] = {"spec": spec, "spec_digest": DIGEST, "source_schema": job.source_schema, "model": "fake"}
    old = write_part(storage, job.folder, shard, rows, **common)
    new = retried(job, old, 1, 4, storage=storage)
    assert retried(job, old, 1, 4, storage=storage) == replace(new, adopted=True, replaces=old.etag)
    assert [info.etag for info in storage.list(root)] == [new.etag]
    assert all(row.is_answered for row in read_part(storage, new.uri, shard, spec=spec, etag=new.etag).values())
    with pytest.raises(SourceChangedError):
        read_part(storage, new.uri, shard, spec=spec, etag=old.etag)
