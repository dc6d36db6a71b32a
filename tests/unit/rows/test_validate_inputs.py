import itertools
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.rows.row_inputs import DEBIAN, make_spec, write

import nightmill.duplicates
from nightmill.duplicates import find_duplicate_ids
from nightmill.errors import ExitCode, StorageError, ValidationError
from nightmill.sharding import list_sources
from nightmill.validate import plan_input, summarize_lengths, validate_inputs


def test_case_I018_duplicate_custom_id(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"prompt": ["p"] * 4, "custom_id": ["b", "a", "c", "a"]})
    with pytest.raises(ValidationError) as caught:
        plan_input(make_spec(path))
    assert caught.value.exit_code == ExitCode.VALIDATION == 3
    assert f"custom_id 'a' stands in {path} row 1 and again in {path} row 3" in caught.value.message
    assert "--allow-duplicate-ids" in (caught.value.hint or "")
    for spec in (make_spec(path, allow_duplicate_ids=True), make_spec(path, check_ids=False)):
        assert len(plan_input(spec).shards) == 1


def test_duplicates_over_files_and_types(tmp_path: Path) -> None:
    write(tmp_path / "1.parquet", {"prompt": ["p"] * 2, "custom_id": [7, 8]})
    write(tmp_path / "2.parquet", {"prompt": ["p"] * 2, "custom_id": [9, 7]})
    sources = list_sources([str(tmp_path)])
    (found,) = find_duplicate_ids(sources, make_spec(tmp_path))
    assert (found.custom_id, found.first, found.second) == (
        "7", f"{tmp_path}/1.parquet row 0", f"{tmp_path}/2.parquet row 1"
    )  # fmt: skip


def test_default_ids_are_never_read(tmp_path: Path) -> None:
    assert find_duplicate_ids(list_sources([str(DEBIAN)]), make_spec(DEBIAN)) == ()


def test_nulls_are_no_duplicates_of_each_other(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"prompt": ["p"] * 3, "custom_id": pa.nulls(3, pa.string())})
    assert find_duplicate_ids(list_sources([str(path)]), make_spec(path)) == ()


@given(
    files=st.lists(st.lists(st.none() | st.integers(0, 40).map(str), max_size=40), min_size=1, max_size=3),
    hash_id=st.sampled_from([hash, lambda _: 0, lambda text: len(text), lambda text: -(2**63) + len(text)]),
    per_bucket=st.sampled_from([3, 1000]),
    at_once=st.sampled_from([2, 7, 1000]),
)
@settings(max_examples=60, deadline=None)
def test_duplicates_are_exactly_those_whatever_the_hash(
    files: list[list[str | None]],
    hash_id: Callable[[str], int],
    per_bucket: int,
    at_once: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("ids")
    for number, ids in enumerate(files):
        columns = {"prompt": pa.array(["p"] * len(ids), pa.string()), "custom_id": pa.array(ids, pa.string())}
        write(folder / f"{number}.parquet", columns, row_group_size=5)
    counts = Counter(name for name in itertools.chain(*files) if name is not None)
    if not sum(map(len, files)):
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nightmill.duplicates, "_ROWS_PER_BUCKET", per_bucket)
        patch.setattr(nightmill.duplicates, "_SUSPECTS_AT_ONCE", at_once)
        found = find_duplicate_ids(list_sources([str(folder)]), make_spec(folder), hash_id=hash_id, limit=1000)
    assert Counter(duplicate.custom_id for duplicate in found) == {k: n - 1 for k, n in counts.items() if n > 1}
    for duplicate in found:
        for place in (duplicate.first, duplicate.second):
            uri, _, row = place.rpartition(" row ")
            assert files[int(Path(uri).stem)][int(row)] == duplicate.custom_id
        assert duplicate.first != duplicate.second


def test_a_million_equal_ids_are_told_by_the_first(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"prompt": pa.nulls(50_000, pa.string()), "custom_id": ["a"] * 50_000})
    found = find_duplicate_ids(list_sources([str(path)]), make_spec(path), limit=3)
    assert [(d.first[-5:], d.second[-5:]) for d in found] == [("row 0", f"row {n}") for n in (1, 2, 3)]


def test_no_room_for_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "x.parquet", {"prompt": ["p"], "custom_id": ["a"]})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(nightmill.duplicates._Buckets, "add", full)
    with pytest.raises(StorageError, match=r"(?s)No space left.*--no-check-ids"):
        find_duplicate_ids(list_sources([str(path)]), make_spec(path))


def test_report(tmp_path: Path) -> None:
    data = {
        "prompt": ["one two", None, "", "three"],
        "sampling_params": [None, None, None, '{"bogus": 1}'],
        "custom_id": ["a", "b", "b", "c"],
    }
    path = write(tmp_path / "x.parquet", data)
    report = validate_inputs(make_spec(path), count_tokens=lambda rows: [len((r.prompt or "").split()) for r in rows])
    assert (report.num_rows, report.size_bytes) == (4, path.stat().st_size)
    assert report.error_codes == {"empty_prompt": 1, "invalid_sampling_params": 1, "null_prompt": 1}
    assert [(p.row_index, p.code) for p in report.problems] == [
        (1, "null_prompt"), (2, "empty_prompt"), (3, "invalid_sampling_params")
    ]  # fmt: skip
    assert [d.custom_id for d in report.duplicates] == ["b"]
    assert report.token_lengths == summarize_lengths(Counter([2]))
    assert report.plan.output_schema.names[:3] == list(data)


def test_real_rows_have_no_problem() -> None:
    report = validate_inputs(make_spec(DEBIAN, prompt_column="description"))
    assert (report.error_codes, report.duplicates, report.token_lengths) == ({}, (), None)


@given(st.lists(st.integers(0, 5000), min_size=1))
def test_length_summary(lengths: list[int]) -> None:
    summary = summarize_lengths(Counter(lengths))
    ordered = sorted(lengths)
    assert (summary.minimum, summary.maximum, summary.total) == (ordered[0], ordered[-1], sum(lengths))
    assert summary.median == ordered[-(-len(ordered) // 2) - 1]
    assert sum(rows for _, rows in summary.histogram) == summary.num_rows == len(lengths)
    for bound, rows in summary.histogram:
        low = 0 if bound == 1 else bound // 2 + 1
        assert rows == sum(low <= length <= bound for length in lengths)


@pytest.mark.parametrize(
    ("modules", "never"),
    [("nightmill.validate, nightmill.output", {"torch", "transformers"}), ("nightmill.storage", {"pyarrow"})],
)
def test_imports_stay_light(modules: str, never: set[str]) -> None:
    code = f"import sys, {modules}; sys.exit(bool({never!r} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
