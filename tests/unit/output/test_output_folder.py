from pathlib import Path

from nightmill.output import OutputFolder


def test_names(tmp_path: Path) -> None:
    folder = OutputFolder(str(tmp_path / "x" / ".." / "out"), "job-1")
    assert folder.part(7) == f"{tmp_path}/out/part-00007.parquet"
    assert folder.part(123456) == f"{tmp_path}/out/part-123456.parquet"
    assert folder.work == f"{tmp_path}/out/_nightmill/job-1"
    assert folder.manifest == f"{tmp_path}/out/_manifest.json"
