import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.contract.store_jobs import make_result

from nightmill.errors import ExitCode, OutputOccupiedError, SpecMismatchError, ValidationError
from nightmill.job_file import job_file_uri, read_job_file
from nightmill.records import JobInfo, JobOptions, JobSpec, ModelSpec, RowCounts, SourceFile
from nightmill.sampling import SamplingParams
from nightmill.states import JobStatus, ShardState
from nightmill.storage import LocalStorage
from nightmill.store import Store
from nightmill.submit import submit_job


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(f"sqlite:///{tmp_path / 'store.db'}")
    store.migrate()
    yield store
    store.close()


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    write_input(tmp_path / "in.parquet", 25)
    return JobSpec(inputs=(str(tmp_path / "in.parquet"),), output=str(tmp_path / "out"), model=ModelSpec(model="demo"))


OPTIONS = JobOptions(shard_rows=10)


def write_input(path: Path, rows: int) -> None:
    pq.write_table(pa.table({"prompt": [f"prompt {i}" for i in range(rows)]}), path, row_group_size=10)


def finish(store: Store, job_id: str) -> JobInfo:
    for shard_id in store.available_shards(100, job_id):
        lease = store.claim(shard_id, "w")
        assert lease is not None
        store.commit_shard(lease, make_result(lease))
    assert store.begin_finalize(job_id)
    return store.complete_job(job_id)


def test_a_new_job_is_planned_and_its_output_is_marked(store: Store, spec: JobSpec) -> None:
    job = submit_job(store, spec, OPTIONS, model_digest="sha256:m")
    assert job.status is JobStatus.QUEUED
    assert job.rows == RowCounts(total=25)
    assert job.num_shards == 3
    assert job.model_digest == "sha256:m"
    owner = read_job_file(LocalStorage(), spec.output)
    assert owner is not None
    assert (owner.job_id, owner.spec_digest, owner.spec) == (job.job_id, job.spec_digest, spec)
    assert owner.sources == tuple(store.sources(job.job_id))


def test_the_same_submission_is_the_same_job(store: Store, spec: JobSpec) -> None:
    job = submit_job(store, spec, OPTIONS)
    assert submit_job(store, spec, OPTIONS) == job
    done = finish(store, job.job_id)
    assert submit_job(store, spec, OPTIONS) == done
    assert len(store.jobs()) == 1


def test_how_fast_and_how_many_at_once_is_not_another_job(store: Store, spec: JobSpec) -> None:
    job = submit_job(store, spec, OPTIONS)
    again = submit_job(store, spec, JobOptions(shard_rows=5, max_failures=1))
    assert (again.job_id, again.num_shards, again.options) == (job.job_id, 3, OPTIONS)


def test_relative_paths_mean_the_same_job_from_anywhere(
    store: Store, spec: JobSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submit_job(store, spec, OPTIONS)
    monkeypatch.chdir(tmp_path)
    assert submit_job(store, replace(spec, inputs=("in.parquet",), output="./out"), OPTIONS) == job


def test_a_changed_specification_is_refused_with_what_changed(store: Store, spec: JobSpec) -> None:
    job = submit_job(store, spec, OPTIONS)
    changed = replace(spec, sampling=SamplingParams(temperature=0.7), seed=3)
    with pytest.raises(SpecMismatchError) as caught:
        submit_job(store, changed, OPTIONS)
    assert job.job_id in caught.value.message
    assert "temperature: 0.0 → 0.7" in caught.value.message
    assert "seed: 0 → 3" in caught.value.message
    assert caught.value.exit_code == ExitCode.VALIDATION
    assert store.jobs() == [job]


def test_another_model_under_the_same_name_is_refused(store: Store, spec: JobSpec) -> None:
    job = submit_job(store, spec, OPTIONS, model_digest="sha256:old")
    with pytest.raises(SpecMismatchError, match="content of the model: sha256:old → sha256:new"):
        submit_job(store, spec, OPTIONS, model_digest="sha256:new")
    assert submit_job(store, spec, OPTIONS, model_digest=None) == job


def test_an_input_that_changed_since_is_refused(store: Store, spec: JobSpec) -> None:
    submit_job(store, spec, OPTIONS)
    write_input(Path(spec.inputs[0]), 26)
    with pytest.raises(SpecMismatchError, match=r"in\.parquet: 25 rows → 26 rows"):
        submit_job(store, spec, OPTIONS)


def test_case_I026_an_output_with_foreign_files_is_refused_and_left_alone(store: Store, spec: JobSpec) -> None:
    theirs = Path(spec.output) / "deep" / "part-00000.parquet"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("precious")
    with pytest.raises(OutputOccupiedError, match=r"part-00000\.parquet") as caught:
        submit_job(store, spec, OPTIONS)
    assert caught.value.exit_code == ExitCode.VALIDATION
    assert theirs.read_text() == "precious"
    assert store.jobs() == []
    assert [path for path in Path(spec.output).rglob("*") if path.is_file()] == [theirs]


@pytest.mark.parametrize(
    ("name", "free"), [("_nightmill/probe-0a1b-0", True), ("_nightmill/x", False), ("probe-0", False)]
)
def test_a_probe_that_another_submission_writes_or_left_takes_no_output(
    store: Store, spec: JobSpec, name: str, free: bool
) -> None:
    path = Path(spec.output) / name
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    if free:
        assert submit_job(store, spec, OPTIONS).status is JobStatus.QUEUED
        return
    with pytest.raises(OutputOccupiedError, match="no job of nightmill wrote"):
        submit_job(store, spec, OPTIONS)


def test_an_output_that_is_a_file_is_refused(store: Store, spec: JobSpec, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("precious")
    with pytest.raises(OutputOccupiedError, match="is a file"):
        submit_job(store, spec, OPTIONS)


def test_an_empty_folder_is_free(store: Store, spec: JobSpec) -> None:
    Path(spec.output).mkdir()
    assert submit_job(store, spec, OPTIONS).num_shards == 3


@pytest.mark.parametrize("content", ["", "{", "[]", '{"job_id": 3}', "\0"])
def test_a_job_file_that_is_not_ours_is_refused(store: Store, spec: JobSpec, content: str) -> None:
    path = Path(job_file_uri(spec.output))
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(OutputOccupiedError, match=r"job\.json"):
        submit_job(store, spec, OPTIONS)
    assert path.read_text() == content


def test_a_refused_input_leaves_nothing(store: Store, spec: JobSpec) -> None:
    def check(_: JobSpec, sources: Sequence[SourceFile]) -> None:
        raise ValidationError(f"{sources[0].uri}: duplicates")

    with pytest.raises(ValidationError, match="duplicates"):
        submit_job(store, spec, OPTIONS, check=check)
    with pytest.raises(ValidationError):
        submit_job(store, replace(spec, inputs=("/no/such.parquet",)), OPTIONS)
    assert not Path(spec.output).exists()
    assert store.jobs() == []


def test_the_check_is_for_new_jobs_only(store: Store, spec: JobSpec) -> None:
    calls: list[JobSpec] = []
    for _ in range(2):
        submit_job(store, spec, OPTIONS, check=lambda spec, _: calls.append(spec))
    assert calls == [spec]


# The store and the files disagree


def test_a_lost_store_is_rebuilt_from_the_output(store: Store, spec: JobSpec, tmp_path: Path) -> None:
    job = submit_job(store, spec, OPTIONS, model_digest="sha256:m")
    other = Store(f"sqlite:///{tmp_path / 'other.db'}")
    other.migrate()
    rebuilt = submit_job(other, spec, JobOptions(shard_rows=7))
    assert (rebuilt.job_id, rebuilt.num_shards, rebuilt.options.shard_rows) == (job.job_id, 3, 10)
    assert rebuilt.model_digest == "sha256:m"
    other.close()


def test_a_removed_job_file_is_written_again_from_the_store(store: Store, spec: JobSpec) -> None:
    job = submit_job(store, spec, OPTIONS, model_digest="sha256:m")
    job_file = Path(job_file_uri(spec.output))
    before = job_file.read_bytes()
    job_file.unlink()
    checkpoint = Path(spec.output) / "_nightmill" / job.job_id / "shard-00000" / "ckpt-1-1.parquet"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_bytes(b"")
    assert submit_job(store, spec, OPTIONS, model_digest="sha256:m").job_id == job.job_id
    assert job_file.read_bytes() == before
    job_file.unlink()
    checkpoint.rename(Path(spec.output) / "somebody.else")
    checkpoint.parent.rmdir()
    with pytest.raises(OutputOccupiedError, match="somebody"):
        submit_job(store, spec, OPTIONS, model_digest="sha256:m")


def test_a_removed_output_frees_the_place_of_a_dead_job(store: Store, spec: JobSpec) -> None:
    old = submit_job(store, spec, OPTIONS)
    Path(job_file_uri(spec.output)).unlink()
    new = submit_job(store, replace(spec, seed=9), OPTIONS)
    assert new.job_id != old.job_id
    retired = store.job(old.job_id)
    assert (retired.status, retired.error_code) == (JobStatus.FAILED, "output_removed")
    assert retired.rows == RowCounts(total=25, cancelled=25)


def test_a_removed_output_of_a_running_job_is_not_taken_over(store: Store, spec: JobSpec) -> None:
    old = submit_job(store, spec, OPTIONS)
    assert store.claim(store.available_shards(1)[0], "w") is not None
    Path(job_file_uri(spec.output)).unlink()
    with pytest.raises(OutputOccupiedError, match=f"{old.job_id} is running"):
        submit_job(store, replace(spec, seed=9), OPTIONS)
    assert not Path(job_file_uri(spec.output)).exists()
    assert store.job(old.job_id).status is JobStatus.IN_PROGRESS


def test_a_removed_output_of_an_ended_job_changes_nothing_of_it(store: Store, spec: JobSpec) -> None:
    done = finish(store, submit_job(store, spec, OPTIONS).job_id)
    Path(job_file_uri(spec.output)).unlink()
    assert submit_job(store, spec, OPTIONS).job_id != done.job_id
    assert store.job(done.job_id) == done


SUBMIT = """
import sys
from nightmill.records import *
from nightmill.store import Store
from nightmill.submit import submit_job
url, source, output = sys.argv[1:]
spec = JobSpec(inputs=(source,), output=output, model=ModelSpec(model="demo"))
submit_job(Store(url), spec, JobOptions(shard_rows=10))
"""


def test_killed_between_the_file_and_the_store_the_next_submission_goes_on(
    store: Store, spec: JobSpec, tmp_path: Path
) -> None:
    arguments = [f"sqlite:///{tmp_path / 'store.db'}", spec.inputs[0], spec.output]
    environ = os.environ | {"NIGHTMILL_FAILPOINT": "after_job_file"}
    done = subprocess.run([sys.executable, "-c", SUBMIT, *arguments], env=environ, check=False)
    assert done.returncode == -signal.SIGKILL
    assert store.jobs() == []
    owner = read_job_file(LocalStorage(), spec.output)
    assert owner is not None
    assert submit_job(store, spec, OPTIONS).job_id == owner.job_id


def test_many_submissions_at_once_are_one_job(store: Store, spec: JobSpec) -> None:
    start = threading.Barrier(6)
    ids: list[str] = []
    failures: list[BaseException] = []

    def work() -> None:
        start.wait()
        try:
            ids.append(submit_job(store, spec, OPTIONS).job_id)
        except BaseException as error:  # noqa: BLE001 - shown by the assertion below
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(ids) == 6
    assert [job.job_id for job in store.jobs()] == [ids[0]]
    assert set(ids) == {ids[0]}
    assert store.job(ids[0]).num_shards_by_state == {ShardState.AVAILABLE: 3}


# Idempotency keys


def test_an_idempotency_key_gives_the_job_it_was_used_for(store: Store, spec: JobSpec) -> None:
    options = replace(OPTIONS, idempotency_key="nightly")
    job = submit_job(store, spec, options)
    assert submit_job(store, spec, options) == job


def test_an_idempotency_key_is_not_for_another_job(store: Store, spec: JobSpec, tmp_path: Path) -> None:
    options = replace(OPTIONS, idempotency_key="nightly")
    submit_job(store, spec, options)
    with pytest.raises(SpecMismatchError, match=r"output: .*out → .*other"):
        submit_job(store, replace(spec, output=str(tmp_path / "other")), options)
    with pytest.raises(SpecMismatchError, match="seed: 0 → 1"):
        submit_job(store, replace(spec, seed=1), options)
    assert not (tmp_path / "other").exists()
