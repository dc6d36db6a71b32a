from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.rows.row_inputs import DEBIAN, write

from nightmill.errors import ValidationError
from nightmill.reader import Extent
from nightmill.records import ShardRange, SourceFile
from nightmill.sharding import SPLIT_ABOVE, _cut, list_sources, plan_shards, source_name

ROWS = {"prompt": ["a", "b", "c"]}


def names(sources: tuple[SourceFile, ...], root: Path) -> list[str]:
    return [source.uri.removeprefix(f"{root}/") for source in sources]


def test_one_file() -> None:
    (source,) = list_sources([str(DEBIAN)])
    assert (source.num_rows, source.size_bytes, source.uri) == (2000, DEBIAN.stat().st_size, str(DEBIAN))


def test_a_folder_is_read_at_any_depth_without_hidden_names(tmp_path: Path) -> None:
    for name in ("b.parquet", "a/x.parquet", "a/.hidden.parquet", "_tmp/y.parquet", "a/_SUCCESS", "notes.txt"):
        write(tmp_path / name, ROWS)
    assert names(list_sources([str(tmp_path)]), tmp_path) == ["a/x.parquet", "b.parquet"]


def test_globs(tmp_path: Path) -> None:
    for name in ("1.parquet", "2.parquet", "x/3.parquet", "x/y/4.parquet", "[5].parquet"):
        write(tmp_path / name, ROWS)
    cases = {
        "*.parquet": ["1.parquet", "2.parquet", "[5].parquet"],
        "?.parquet": ["1.parquet", "2.parquet"],
        "[12].parquet": ["1.parquet", "2.parquet"],
        "*/*.parquet": ["x/3.parquet"],
        "x/**/*.parquet": ["x/3.parquet", "x/y/4.parquet"],
        "[5].parquet": ["[5].parquet"],  # a name that exists is no pattern
    }
    for pattern, found in cases.items():
        assert names(list_sources([f"{tmp_path}/{pattern}"]), tmp_path) == found, pattern


def test_a_folder_that_is_called_like_a_pattern(tmp_path: Path) -> None:
    for name in ("run [1]/a.parquet", "run [1]/.b.parquet", "run [1]/sub?/c.parquet", "run 1x/d.parquet"):
        write(tmp_path / name, ROWS)
    sources = list_sources([f"{tmp_path}/run [1]/"])
    assert names(sources, tmp_path) == ["run [1]/a.parquet", "run [1]/sub?/c.parquet"]
    assert len({source_name([f"{tmp_path}/run [1]"], source.uri) for source in sources}) == 2
    assert names(list_sources([f"{tmp_path}/run [1]/sub?"]), tmp_path) == ["run [1]/sub?/c.parquet"]
    with pytest.raises(ValidationError, match="no such file"):
        list_sources([f"{tmp_path}/run [2]"])


def test_each_file_once_in_the_order_given(tmp_path: Path) -> None:
    for name in ("a.parquet", "b.parquet"):
        write(tmp_path / name, ROWS)
    sources = list_sources([str(tmp_path / "b.parquet"), str(tmp_path), str(tmp_path / "a.parquet")])
    assert names(sources, tmp_path) == ["b.parquet", "a.parquet"]


def test_output_below_input_is_left_out(tmp_path: Path) -> None:
    write(tmp_path / "in.parquet", ROWS)
    write(tmp_path / "out" / "part-00000.parquet", ROWS)
    assert names(list_sources([str(tmp_path)], output=str(tmp_path / "out")), tmp_path) == ["in.parquet"]
    assert len(list_sources([str(tmp_path)])) == 2


def test_relative_inputs_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "in.parquet", ROWS)
    monkeypatch.chdir(tmp_path)
    assert list_sources(["in.parquet"])[0].uri == str(tmp_path / "in.parquet")


def test_parquet_by_its_first_bytes(tmp_path: Path) -> None:
    path = write(tmp_path / "000000_0", ROWS)
    assert list_sources([str(path)])[0].num_rows == 3


def test_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("prompt\nhi\n")
    with pytest.raises(ValidationError, match=r"x\.csv is neither a Parquet file nor a \.jsonl file"):
        list_sources([str(tmp_path / "x.csv")])


@pytest.mark.parametrize("name", ["missing.parquet", "empty", "none*.parquet"])
def test_nothing_there(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValidationError, match="no such file"):
        list_sources([str(tmp_path / name)])


def test_no_rows(tmp_path: Path) -> None:
    empty = write(tmp_path / "e.parquet", pa.table({"prompt": pa.array([], pa.string())}))
    with pytest.raises(ValidationError, match=r"no rows to run: .*e\.parquet"):
        list_sources([str(empty)])
    full = write(tmp_path / "f.parquet", ROWS)
    sources = list_sources([str(empty), str(full)])
    assert [shard.source_file for shard in plan_shards(sources)] == [str(full)]


@pytest.mark.parametrize("keep", [0, 3, 100, -8])
def test_truncated_parquet_is_named(keep: int, tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", ROWS)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValidationError, match=r"t\.parquet.*(?s:.)*truncated or damaged"):
        list_sources([str(path)])


def test_shards_align_to_row_groups(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"prompt": ["x"] * 1000}, row_group_size=300)
    shards = plan_shards(list_sources([str(path)]), 700)
    assert [(s.index, s.row_start, s.row_end) for s in shards] == [(0, 0, 600), (1, 600, 1000)]


def test_a_row_group_is_split_only_above_four_targets(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"prompt": ["x"] * 1000})
    sources = list_sources([str(path)])
    assert len(plan_shards(sources, 250)) == 1
    assert [(s.row_start, s.row_end) for s in plan_shards(sources, 249)] == [
        (0, 200), (200, 400), (400, 600), (600, 800), (800, 1000)
    ]  # fmt: skip


def test_case_I039_a_file_of_one_row_group_has_many_shards(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"prompt": ["x"] * 100_000})
    shards = plan_shards(list_sources([str(path)]), 2000)
    assert len(shards) == 50
    assert max(shard.num_rows for shard in shards) == 2000


def test_bytes_bound_a_shard_too(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"prompt": [str(i) * 1000 for i in range(100)]}, row_group_size=10)
    shards = plan_shards(list_sources([str(path)]), 2000, shard_bytes=50_000)
    assert len(shards) > 3
    assert sum(shard.num_rows for shard in shards) == 100


def test_planning_reads_footers_only(tmp_path: Path) -> None:
    """All bytes of the data pages may be lost: the plan stands."""
    path = write(tmp_path / "x.parquet", {"prompt": [str(i) for i in range(1000)]}, row_group_size=100)
    whole = path.read_bytes()
    footer = int.from_bytes(whole[-8:-4], "little") + 8
    before = plan_shards(list_sources([str(path)]), 100)
    path.write_bytes(b"PAR1" + b"\x00" * (len(whole) - 4 - footer) + whole[-footer:])
    assert plan_shards(list_sources([str(path)]), 100) == before


extents = st.lists(st.builds(Extent, num_rows=st.integers(0, 5000), num_bytes=st.integers(0, 10**6)), max_size=30)


@given(extents, st.integers(1, 3000), st.integers(1, 10**6))
def test_shards_cover_every_row_once_and_are_bounded(extents: list[Extent], shard_rows: int, shard_bytes: int) -> None:
    ranges = list(_cut(extents, shard_rows, shard_bytes))
    position = 0
    for start, end in ranges:
        assert start == position
        assert end > start
        assert end - start <= SPLIT_ABOVE * shard_rows
        position = end
    assert position == sum(extent.num_rows for extent in extents)
    edges = {0}
    for extent in extents:
        edges.add(max(edges) + extent.num_rows)
    small = all(e.num_rows <= shard_rows and e.num_bytes <= shard_bytes for e in extents)
    assert not small or all(end in edges and end - start <= shard_rows for start, end in ranges)


def test_source_names_are_unique_and_move_with_the_data(tmp_path: Path) -> None:
    for root in (tmp_path / "one", tmp_path / "two"):
        for name in ("en/0.parquet", "de/0.parquet"):
            write(root / name, ROWS)
    found = []
    for root in (tmp_path / "one", tmp_path / "two"):
        for inputs in ([str(root)], [f"{root}/*/0.parquet"], [f"{root}/de", f"{root}/en/0.parquet"]):
            found.append([source_name(inputs, source.uri) for source in list_sources(inputs)])
    assert all(names == ["de/0.parquet", "en/0.parquet"] for names in found)
    assert source_name([str(DEBIAN)], str(DEBIAN)) == DEBIAN.name


def test_file_and_range_of_the_records(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", ROWS)
    sources = list_sources([str(path)])
    assert plan_shards(sources) == (ShardRange(index=0, source_file=str(path), row_start=0, row_end=3),)
    assert pq.read_metadata(path).num_rows == sources[0].num_rows
    with pytest.raises(ValidationError, match="at least one row"):
        plan_shards(sources, 0)
