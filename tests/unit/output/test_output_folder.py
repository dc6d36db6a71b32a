import threading
from pathlib import Path

import pytest
from tests.unit.output.output_jobs import STORAGE

from nightmill.errors import ExitCode, OutputOccupiedError, StorageError
from nightmill.output import JobFile, OutputFolder, claim_output, read_job_file

JOB = JobFile(job_id="job-1", spec_digest="d", spec='{"a":1}')


def test_a_new_folder_is_claimed_once_and_says_whose_it_is(tmp_path: Path) -> None:
    out = str(tmp_path / "a" / "out")
    assert read_job_file(out) is None
    assert claim_output(out, JOB) == JOB
    assert read_job_file(out) == JOB
    other = JobFile(job_id="job-2", spec_digest="e", spec="{}")
    assert claim_output(out, other) == JOB
    assert claim_output(out, JOB) == JOB


@pytest.mark.parametrize("name", ["data.parquet", "sub/x.txt", "part-00000.parquet", "_SUCCESS"])
def test_case_I026_a_folder_with_foreign_files_is_refused_and_nothing_deleted(name: str, tmp_path: Path) -> None:
    path = tmp_path / "out" / name
    path.parent.mkdir(parents=True)
    path.write_text("precious")
    with pytest.raises(OutputOccupiedError, match=name) as caught:
        claim_output(str(tmp_path / "out"), JOB)
    assert caught.value.exit_code == ExitCode.VALIDATION
    assert path.read_text() == "precious"
    assert [info.uri for info in STORAGE.list(str(tmp_path / "out"))] == [str(path)]


def test_dot_files_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / ".DS_Store").write_text("")
    (tmp_path / "empty").mkdir()
    assert claim_output(str(tmp_path), JOB) == JOB


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(OutputOccupiedError, match="is a file"):
        claim_output(str(tmp_path / "out"), JOB)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 2}', '{"version": 1}'])
def test_a_job_file_that_is_not_understood(text: str, tmp_path: Path) -> None:
    path = Path(OutputFolder(str(tmp_path), "job-1").job_file)
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(StorageError, match=r"job\.json cannot be understood"):
        claim_output(str(tmp_path), JOB)


def test_of_eight_claims_at_once_one_wins_and_all_know(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    owners: list[JobFile] = []

    def claim(number: int) -> None:
        owners.append(claim_output(out, JobFile(job_id=f"job-{number}", spec_digest="d", spec="{}")))

    threads = [threading.Thread(target=claim, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(owners) == 8
    assert set(owners) == {read_job_file(out)}


def test_names(tmp_path: Path) -> None:
    folder = OutputFolder(str(tmp_path / "x" / ".." / "out"), "job-1")
    assert folder.part(7) == f"{tmp_path}/out/part-00007.parquet"
    assert folder.part(123456) == f"{tmp_path}/out/part-123456.parquet"
    assert folder.work == f"{tmp_path}/out/_nightmill/job-1"
