"""A submit of many files says how far it is."""

from collections import defaultdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nightmill.cli.planning_view import PlanningLines, planning_view
from nightmill.config import Settings
from nightmill.records import JobOptions, JobSpec, ModelSpec
from nightmill.store import Store
from nightmill.submission import submit_and_ring

FILES = 6


def test_each_pass_over_the_files_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for i in range(FILES):
        table = pa.table({"prompt": ["a", "b"], "custom_id": [f"{i}-0", f"{i}-1"]})
        pq.write_table(table, folder / f"{i}.parquet")
    told: dict[str, list[tuple[int, int]]] = defaultdict(list)

    def tell(what: str, done: int, total: int) -> None:
        told[what].append((done, total))

    settings = Settings.from_env({"HOME": str(tmp_path), "NIGHTMILL_HOME": str(tmp_path / "home")})
    store = Store(settings.database_url)
    store.migrate()
    spec = JobSpec(inputs=(str(folder),), output=str(tmp_path / "out"), model=ModelSpec(model="demo"))
    job, _ = submit_and_ring(store, settings, spec, JobOptions(), progress=tell)
    store.close()
    assert job.rows.total == 2 * FILES
    every_file = [(done, FILES) for done in range(1, FILES + 1)]
    assert dict(told) == dict.fromkeys(
        ["reading sizes", "reading columns", "looking for duplicate ids", "cutting into shards"], every_file
    )


def test_lines_come_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    moment = [100.0]
    monkeypatch.setattr("nightmill.cli.planning_view.time.monotonic", lambda: moment[0])
    said: list[str] = []
    lines = PlanningLines(said.append, first_s=1.0, every_s=5.0)
    for done in range(1, 44):
        moment[0] += 0.25
        lines("reading sizes", done, 20_000)
    assert said == ["planning: reading sizes, 4 of 20,000 files", "planning: reading sizes, 24 of 20,000 files"]


def test_a_log_gets_lines_and_quiet_gets_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    moment = [100.0]
    monkeypatch.setattr("nightmill.cli.planning_view.time.monotonic", lambda: moment[0])
    for quiet in (True, False):
        with planning_view(quiet=quiet) as progress:
            moment[0] += 10
            progress("reading sizes", 3, 4)
    out, err = capsys.readouterr()
    assert (out, err) == ("", "planning: reading sizes, 3 of 4 files\n")
