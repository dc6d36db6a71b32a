"""Memory is bounded by configuration, not by the size of a column (case I012) or of a job (cases I044, I064)."""

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

MIB = 2**20

SCRIPT = """
import sys
from tests.unit.output.output_jobs import SmallJob, answer
from tests.unit.rows.row_inputs import make_spec

def peak():
    # Not ru_maxrss: a child begins with its parent's.
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1]) // 1024

job = SmallJob(make_spec(sys.argv[1], output=sys.argv[2]), shard_rows=10**9)
before = peak()
rows = [job.completions(shard, lambda row: answer(row, text=str(len(row.prompt)))) for shard in job.shards]
read = peak()
parts = [job.part(shard, completions) for shard, completions in zip(job.shards, rows)]
print(before, read, peak(), sum(part.rows.completed for part in parts))
"""


TINY = """
import sys
from tests.unit.rows.row_inputs import make_spec, rows_of
from nightmill.reader import read_shard
from nightmill.rows import parse_rows
from nightmill.sharding import list_sources, plan_shards

def now():
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmRSS")]
    return int(line.split()[1])

spec = make_spec(sys.argv[1])
sizes, count = [], 0
for shard in plan_shards(list_sources(spec.inputs)):
    for batch in read_shard(shard, spec):
        count += sum(1 for _ in parse_rows(batch, spec))
    sizes.append(now())
print(count, sizes[len(sizes) // 4], sizes[-1])
"""


def write_column(path: Path, rows: int, row_bytes: int) -> None:
    """One row group, one column of rows * row_bytes, neither compressed nor stored once."""
    schema = pa.schema([("prompt", pa.string())])
    with pq.ParquetWriter(path, schema, use_dictionary=False, compression="none", write_batch_size=16) as writer:
        chunks = [pa.array([f"{row} " + "lorem ipsum " * (row_bytes // 12)]) for row in range(rows)]
        writer.write_table(pa.table([pa.chunked_array(chunks)], schema=schema), row_group_size=rows)


def script(code: str, *arguments: Path | str) -> list[int]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return list(map(int, done.stdout.split()))


def test_case_I012_a_column_larger_than_memory_allows(tmp_path: Path) -> None:
    path = tmp_path / "big.parquet"
    write_column(path, rows=400, row_bytes=MIB)
    before, read, wrote, completed = script(SCRIPT, path, tmp_path / "out")
    assert completed == 400
    assert read - before < 120, "reading 400 MiB"
    assert wrote - before < 250, "writing 400 MiB"


@pytest.mark.long
def test_case_I012_a_column_beyond_two_gigabytes(tmp_path: Path) -> None:
    path = tmp_path / "big.parquet"
    write_column(path, rows=2500, row_bytes=MIB)
    _, _, wrote, completed = script(SCRIPT, path, tmp_path / "out")
    assert completed == 2500
    assert wrote < 1000


def test_case_I064_rows_that_were_read_leave_nothing(tmp_path: Path) -> None:
    path = tmp_path / "tiny.parquet"
    pq.write_table(pa.table({"prompt": [f"hello {n}" for n in range(100_000)]}), path, row_group_size=2000)
    count, quarter, end = script(TINY, path)
    assert count == 100_000
    assert end - quarter < 1000, "kB over 75,000 rows: what one row leaves behind would be ten times that"
