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
from nightmill.validate import validate_inputs

def peak():
    # Not ru_maxrss: a child begins with its parent's.
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1]) // 1024

job = SmallJob(make_spec(sys.argv[1], output=sys.argv[2]), shard_rows=10**9)
before = peak()
(shard,) = job.shards
rows = job.completions(shard, lambda row: answer(row, text=str(len(row.prompt))))
read = peak()
part = job.part(shard, rows)
print(before, read, peak(), part.rows.completed)
"""


def write_column(path: Path, rows: int, row_bytes: int) -> None:
    """One row group, one column of rows * row_bytes; every value differs, so that nothing is stored once."""
    schema = pa.schema([("prompt", pa.string())])
    with pq.ParquetWriter(path, schema, use_dictionary=False, compression="zstd", write_batch_size=16) as writer:
        chunks = [pa.array([f"{row} " + "lorem ipsum " * (row_bytes // 12)]) for row in range(rows)]
        writer.write_table(pa.table([pa.chunked_array(chunks)], schema=schema), row_group_size=rows)


def run(path: Path, out: Path) -> tuple[int, int, int, int]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path), str(out)], check=True, capture_output=True, text=True
    )
    before, read, wrote, completed = map(int, done.stdout.split())
    return before, read, wrote, completed


def test_case_I012_a_column_larger_than_memory_allows(tmp_path: Path) -> None:
    path = tmp_path / "big.parquet"
    write_column(path, rows=600, row_bytes=MIB)
    before, read, wrote, completed = run(path, tmp_path / "out")
    assert completed == 600
    assert read - before < 150, "reading 600 MiB"
    assert wrote - before < 300, "writing 600 MiB"


@pytest.mark.long
def test_case_I012_a_column_beyond_two_gigabytes(tmp_path: Path) -> None:
    path = tmp_path / "big.parquet"
    write_column(path, rows=2500, row_bytes=MIB)
    _, _, wrote, completed = run(path, tmp_path / "out")
    assert completed == 2500
    assert wrote < 1000
