"""Small inputs for tests of reading and rows."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nightmill.reader import read_shard
from nightmill.records import Completion, JobSpec, ModelSpec
from nightmill.rows import InputRow, parse_rows
from nightmill.sharding import list_sources, plan_shards

DEBIAN = Path(__file__).parents[2] / "data" / "debian_packages_2k.parquet"


def make_spec(*inputs: Path | str, output: Path | str = "/nowhere/out", **fields: Any) -> JobSpec:
    spec = JobSpec(inputs=tuple(map(str, inputs)), output=str(output), model=ModelSpec(model="demo"))
    return replace(spec, **fields)


def write(path: Path, data: dict[str, Any] | pa.Table, **options: Any) -> Path:
    table = data if isinstance(data, pa.Table) else pa.table(data)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, **options)
    return path


def rows_of(spec: JobSpec, shard_rows: int = 2000) -> list[InputRow | Completion]:
    """All rows of a job as a worker sees them."""
    rows: list[InputRow | Completion] = []
    for shard in plan_shards(list_sources(spec.inputs), shard_rows):
        for batch in read_shard(shard, spec):
            rows.extend(parse_rows(batch, spec))
    return rows


def codes(rows: Sequence[InputRow | Completion]) -> list[str | None]:
    return [row.error_code if isinstance(row, Completion) else None for row in rows]
