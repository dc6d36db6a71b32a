import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from tests.unit.output.output_jobs import DIGEST, STORAGE, SmallJob, committed
from tests.unit.rows.row_inputs import make_spec, write

import nightmill.output.manifest
from nightmill.errors import StorageError
from nightmill.output import finalize_output
from nightmill.records import CommittedShard
from nightmill.states import ShardState


@pytest.fixture
def job(tmp_path: Path) -> SmallJob:
    path = write(tmp_path / "in.parquet", {"prompt": ["a", "", "c", "d", "e"]}, row_group_size=2)
    return SmallJob(make_spec(path, output=tmp_path / "out"), shard_rows=2)


def checkpoint_all(job: SmallJob) -> None:
    for shard in job.shards:
        writer = job.writer(shard)
        for row in job.completions(shard):
            writer.add(row)
        writer.flush()


def finalize(job: SmallJob, shards: list[CommittedShard], **options: Any) -> None:
    finalize_output(STORAGE, job.folder, shards, spec=job.spec, spec_digest=DIGEST, **options)


def names(job: SmallJob) -> list[str]:
    return [info.uri.removeprefix(job.folder.root + "/") for info in STORAGE.list(job.folder.root)]


@pytest.mark.parametrize("damage", ["gone", "short"])
def test_a_committed_part_that_somebody_damaged_is_no_success(job: SmallJob, damage: str) -> None:
    shards = job.run()
    part = Path(shards[1].result.part_uri)
    whole = part.read_bytes()
    if damage == "gone":
        part.unlink()
    else:
        part.write_bytes(whole[:100])
    with pytest.raises(StorageError, match=r"part-00001\.parquet"):
        finalize(job, shards)
    assert "_SUCCESS" not in names(job)
    part.write_bytes(whole)
    finalize(job, shards)
    assert "_SUCCESS" in names(job)


def test_manifest_success_and_no_checkpoints(job: SmallJob) -> None:
    checkpoint_all(job)
    shards = job.run()
    finalize(job, shards)
    assert names(job) == ["_SUCCESS", "_manifest.json", *(f"part-0000{n}.parquet" for n in range(3))]
    manifest = json.loads(Path(job.folder.manifest).read_text())
    assert manifest["rows"] == {"total": 5, "completed": 4, "failed": 1, "cancelled": 0}
    assert manifest["tokens"] == {"prompt": 12, "completion": 16}
    assert manifest["error_codes"] == {"empty_prompt": 1}
    assert [(p["path"], p["source_file"], p["row_start"], p["row_end"]) for p in manifest["parts"]] == [
        ("part-00000.parquet", "in.parquet", 0, 2),
        ("part-00001.parquet", "in.parquet", 2, 4),
        ("part-00002.parquet", "in.parquet", 4, 5),
    ]


def test_equal_results_have_equal_bytes(job: SmallJob, tmp_path: Path) -> None:
    shards = job.run()
    finalize(job, shards)
    first = Path(job.folder.manifest).read_bytes()
    shuffled = [
        replace(
            shard,
            attempt=9,
            shard_id=shard.shard_id + 7,
            result=replace(
                shard.result,
                part_etag="other",
                tokens=replace(shard.result.tokens, cached=99),
                rows_resumed=1,
                error_codes=dict(reversed(shard.result.error_codes.items())),
            ),
        )
        for shard in shards
    ]
    random.Random(1).shuffle(shuffled)
    again = SmallJob(replace(job.spec, output=str(tmp_path / "elsewhere")), "another-job", 2)
    again.run()
    finalize(again, shuffled)
    assert Path(again.folder.manifest).read_bytes() == first
    changed = replace(shards[0], result=replace(shards[0].result, error_codes={"null_prompt": 1}))
    finalize(again, [changed, *shards[1:]])
    assert Path(again.folder.manifest).read_bytes() != first


def test_a_job_that_did_not_complete_gets_no_success(job: SmallJob) -> None:
    shards = [committed(s, job.part(s), ShardState.CANCELLED) for s in job.shards]
    finalize(job, shards, success=False)
    assert "_SUCCESS" not in names(job)
    assert {p["state"] for p in json.loads(Path(job.folder.manifest).read_text())["parts"]} == {"cancelled"}


def test_only_what_this_job_wrote_is_removed(job: SmallJob) -> None:
    checkpoint_all(job)
    work = Path(job.folder.work)
    foreign = ["_nightmill/job.json", "_nightmill/job-2/shard-00000/ckpt-0001-000001.parquet", "notes.txt"]
    foreign += [f"_nightmill/{job.job_id}/shard-00000/my.parquet", f"_nightmill/{job.job_id}/ckpt-0001-000001.parquet"]
    for name in foreign:
        path = Path(job.folder.root, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    Path(job.folder.root, "an empty folder").mkdir()
    left = Path(job.folder.root, ".nightmill-part-00000.parquet-abcdef.tmp")
    left.write_text("a killed write")
    finalize(job, job.run())
    assert set(foreign) < set(names(job))
    assert not [name for name in names(job) if name.startswith(f"_nightmill/{job.job_id}/") and name not in foreign]
    assert not left.exists()
    assert Path(job.folder.root, "an empty folder").is_dir()
    assert not (work / "shard-00001").exists()


def test_a_crash_in_the_middle_is_gone_through_again(job: SmallJob, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint_all(job)
    shards = job.run()

    class CrashError(Exception):
        pass

    def crash(name: str) -> None:
        raise CrashError(name)

    with monkeypatch.context() as patch:
        patch.setattr(nightmill.output.manifest, "failpoint", crash)
        with pytest.raises(CrashError, match="in_finalize"):
            finalize(job, shards)
    assert "_SUCCESS" not in names(job)
    assert any("ckpt-" in name for name in names(job))
    before = Path(job.folder.manifest).read_bytes()
    for _ in range(2):
        finalize(job, shards)
    assert Path(job.folder.manifest).read_bytes() == before
    assert not any("ckpt-" in name for name in names(job))


def test_readers_see_one_table_while_it_runs_and_after(job: SmallJob) -> None:
    """What begins with `_` or `.` is invisible to a dataset and to a glob of any engine."""
    checkpoint_all(job)
    shards = [committed(shard, job.part(shard)) for shard in job.shards[:2]]
    Path(job.folder.root, ".nightmill-part-00002.parquet-abcdef.tmp").write_bytes(b"half")
    for rows in (4, 5):
        dataset = pyarrow.dataset.dataset(job.folder.root, format="parquet")
        assert dataset.count_rows() == rows
        assert dataset.to_table().column("row_index").to_pylist() == list(range(rows))
        globbed = sorted(Path(job.folder.root).glob("*.parquet"))
        assert [path.name for path in globbed] == [f"part-0000{n}.parquet" for n in range(rows // 2 + rows % 2)]
        assert len({pq.read_schema(path) for path in globbed}) == 1
        if rows == 4:
            shards.append(committed(job.shards[2], job.part(job.shards[2])))
            finalize(job, shards)
