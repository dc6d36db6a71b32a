"""Any source columns, any crash, any duplicates: the part holds the source as it is and each row once."""

import datetime
import decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.output.output_jobs import STORAGE, SmallJob, answer
from tests.unit.rows.row_inputs import make_spec

from nightmill.output import CheckpointReader
from nightmill.records import Completion
from nightmill.rows import InputRow

SCALARS: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.bool_(), st.booleans()),
    (pa.int8(), st.integers(-128, 127)),
    (pa.uint64(), st.integers(0, 2**64 - 1)),
    (pa.float32(), st.floats(width=32, allow_nan=False)),
    (pa.float64(), st.floats(allow_nan=False)),
    (pa.float16(), st.sampled_from([0.0, 1.5, -2.0])),
    (pa.string(), st.text(max_size=8)),
    (pa.large_string(), st.text(max_size=8)),
    (pa.binary(), st.binary(max_size=8)),
    (pa.binary(4), st.binary(min_size=4, max_size=4)),
    (pa.large_binary(), st.binary(max_size=8)),
    (pa.date32(), st.dates(datetime.date(1900, 1, 1))),
    (pa.time64("us"), st.times()),
    (pa.timestamp("us"), st.datetimes(datetime.datetime(1900, 1, 1))),
    (pa.timestamp("us", "Europe/Paris"), st.datetimes(datetime.datetime(1900, 1, 1), timezones=st.just(datetime.UTC))),
    (pa.timestamp("ns", "UTC"), st.integers(-(2**40), 2**40)),
    (pa.duration("ms"), st.integers(-(2**40), 2**40)),
    (pa.decimal128(20, 3), st.integers(-(10**15), 10**15).map(lambda n: decimal.Decimal(n).scaleb(-3))),
    (pa.decimal256(50, 0), st.integers(-(10**45), 10**45).map(decimal.Decimal)),
    (pa.dictionary(pa.int32(), pa.string()), st.sampled_from(["a", "b", "\u00e9", ""])),
    (pa.null(), st.none()),
]


def nested(inner: tuple[pa.DataType, st.SearchStrategy[Any]]) -> list[tuple[pa.DataType, st.SearchStrategy[Any]]]:
    kind, values = inner
    member = st.none() | values
    lists = st.none() | st.lists(member, max_size=3)
    structs = st.none() | st.fixed_dictionaries({"m": member, "k": st.integers(0, 9)})
    maps = st.none() | st.lists(st.tuples(st.text(max_size=3), member), max_size=2)
    return [
        (pa.list_(kind), lists),
        (pa.large_list(kind), lists),
        (pa.struct([("m", kind), ("k", pa.int16())]), structs),
        (pa.map_(pa.string(), kind), maps),
    ]


# Arrow cannot write lists of dictionaries that it builds itself.
ELEMENTS = [pair for pair in SCALARS if not pa.types.is_dictionary(pair[0])]


@st.composite
def column(draw: st.DrawFn, length: int) -> pa.ChunkedArray:
    kind, values = draw(st.sampled_from(SCALARS))
    for _ in range(draw(st.integers(0, 2))):
        kind, values = draw(st.sampled_from(ELEMENTS)) if pa.types.is_dictionary(kind) else (kind, values)
        kind, values = draw(st.sampled_from(nested((kind, values))))
    data = draw(st.lists(st.none() | values, min_size=length, max_size=length))
    if pa.types.is_dictionary(kind):
        return pa.chunked_array([pa.array(data, kind.value_type).dictionary_encode()])
    return pa.chunked_array([pa.array(data, kind)])


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    length = draw(st.integers(1, 12))
    names = draw(st.lists(st.sampled_from(["a", "b.c", "d e", "\u00fc", "tags", "a.b"]), unique=True, max_size=4))
    columns = {name: draw(column(length)) for name in names}
    prompts = draw(st.lists(st.none() | st.text(max_size=4), min_size=length, max_size=length))
    position = draw(st.integers(0, len(names)))
    pairs = [*columns.items()]
    pairs.insert(position, ("prompt", pa.chunked_array([pa.array(prompts, pa.string())])))
    table = pa.table(dict(pairs))
    metadata = draw(st.none() | st.just({"pandas": "{}", "nightmill.job_id": "an older one"}))
    return table.replace_schema_metadata(metadata)


@given(table=tables(), groups=st.integers(1, 12), shard_rows=st.integers(1, 12), batch_rows=st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_source_columns_keep_their_exact_values(
    table: pa.Table, groups: int, shard_rows: int, batch_rows: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("trip")
    path = folder / "in.parquet"
    pq.write_table(table, path, row_group_size=groups)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nightmill.reader.parquet.MAX_BATCH_ROWS", batch_rows)
        job = SmallJob(make_spec(path, output=folder / "out"), shard_rows=shard_rows)
        job.run()
    source, result = pq.read_table(path), pq.read_table(folder / "out")
    assert result.num_rows == table.num_rows
    assert result.select(source.schema.names).equals(source)
    assert pa.schema(list(result.schema)[: len(source.schema)]).equals(pa.schema(list(source.schema)))
    assert result.column("row_index").to_pylist() == list(range(table.num_rows))
    kept = {k: v for k, v in (source.schema.metadata or {}).items() if not k.startswith(b"nightmill.")}
    for shard in job.shards:
        assert (pq.read_schema(job.folder.part(shard.index)).metadata or {}) == kept


@given(
    crashes=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6), st.permutations(range(12))), max_size=5),
    zombie=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_crashes_and_zombies_never_lose_double_or_change_a_row(
    crashes: list[tuple[int, int, list[int]]], zombie: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each attempt runs what is not durable, in any order, and dies after some rows; the last one ends the shard."""
    folder = tmp_path_factory.mktemp("crash")
    path = folder / "in.parquet"
    pq.write_table(pa.table({"prompt": [str(n) for n in range(11)] + [""]}), path)
    job = SmallJob(make_spec(path, output=folder / "out"))
    (shard,) = job.shards
    durable: dict[int, Completion] = {}
    attempt = 0
    for attempt, (survives, max_rows, order) in enumerate([*crashes, (99, 4, list(range(12)))], start=1):
        reader = CheckpointReader(STORAGE, job.folder.work, shard.index)
        assert reader.read() == durable
        writer = job.writer(shard, attempt, max_rows)
        rows = {row.row_index: row for row in job.completions(shard, lambda row, n=attempt: tried(row, n))}
        todo = [index for index in order if index not in reader.row_indices()]
        for index in todo[:survives]:
            writer.add(rows[index])
        if len(todo) > survives:
            durable = job.checkpointed(shard)
            continue
        writer.flush()
        reader.include(writer.files)
        if zombie and attempt > 1:
            late = job.writer(shard, 1)
            late.add(tried_row(rows[0], 77))
            late.flush()
        part = job.part(shard, reader.read())
        break
    assert part.rows.total == 12
    table = pq.read_table(part.uri).to_pylist()
    assert [row["row_index"] for row in table] == list(range(12))
    for row in table:
        if before := durable.get(row["row_index"]):
            assert (row["completion"], row["attempts"]) == (before.text, before.attempts)
        else:
            assert row["attempts"] == attempt or row["error_code"] == "empty_prompt"


def tried(row: InputRow, attempt: int) -> Completion:
    return answer(row, text=f"{row.prompt} in attempt {attempt}", attempts=attempt)


def tried_row(row: Completion, attempt: int) -> Completion:
    return Completion(
        row_index=row.row_index, custom_id=row.custom_id, text="zombie", finish_reason="stop", attempts=attempt
    )
