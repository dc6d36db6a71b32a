import gzip
from pathlib import Path

import pytest

from nightmill.errors import ValidationError
from nightmill.states import Tier
from nightmill_worker.simulate.trace import TraceRow, best_saved_tokens, read_trace

DATA = Path(__file__).parents[2] / "data"


def write(path: Path, text: str) -> Path:
    path.write_text(text, newline="")
    return path


def test_all_columns(tmp_path):
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens,PrefixId,PrefixTokens,MaxTokens,Tier,ArrivalSeconds,Job\r\n"
        "x,100,20,a,64,50,HIGH,1.5,j1\r\nx,7,3,,,,,,\r\n\r\n"
    )
    rows = read_trace(write(tmp_path / "t.csv", "\ufeff" + text)).rows
    assert rows == (
        TraceRow(
            context_tokens=100,
            generated_tokens=20,
            prefix_id="a",
            prefix_tokens=64,
            max_tokens=50,
            tier=Tier.HIGH,
            arrival_s=1.5,
            job_id="j1",
        ),
        TraceRow(context_tokens=7, generated_tokens=3),
    )


@pytest.mark.parametrize(
    ("name", "rows", "context", "generated"), [("conv", 19366, 1155, 211), ("code", 8819, 2048, 28)]
)
def test_the_azure_traces(name, rows, context, generated):
    trace = read_trace(DATA / f"azure_llm_2023_{name}.csv.gz")
    assert len(trace) == rows
    assert round(sum(row.context_tokens for row in trace.rows) / rows) == context
    assert round(sum(row.generated_tokens for row in trace.rows) / rows) == generated


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no column ContextTokens and no column GeneratedTokens"),
        ("ContextTokens\n1\n", "no column GeneratedTokens"),
        ("ContextTokens,GeneratedTokens\n", "has no rows"),
        ("ContextTokens,GeneratedTokens\n1,2\n1,\n", "line 3, column GeneratedTokens: None is not a number"),
        ("ContextTokens,GeneratedTokens\n0,2\n", "line 2, column ContextTokens: must be a whole number of at least 1"),
        ("ContextTokens,GeneratedTokens\n1.5,2\n", "whole number"),
        ("ContextTokens,GeneratedTokens\nnan,2\n", "whole number"),
        ("ContextTokens,GeneratedTokens\n1\n", "line 2, column GeneratedTokens"),
        ("ContextTokens,GeneratedTokens,Tier\n1,2,urgent\n", "column Tier: must be one of high, normal, low"),
        ("ContextTokens,GeneratedTokens,ArrivalSeconds\n1,2,-1\n", "column ArrivalSeconds"),
        ("ContextTokens,GeneratedTokens,ArrivalSeconds\n1,2,x\n", "column ArrivalSeconds"),
        ("ContextTokens,GeneratedTokens,PrefixTokens\n1,2,1\n", "given without a PrefixId"),
    ],
)
def test_a_bad_trace_is_refused_by_line_and_column(tmp_path, text, message):
    with pytest.raises(ValidationError, match=message):
        read_trace(write(tmp_path / "t.csv", text))


def test_broken_files_are_refused(tmp_path):
    whole = gzip.compress(b"ContextTokens,GeneratedTokens\n" + b"12,34\n" * 9999)
    (tmp_path / "cut.csv.gz").write_bytes(whole[:-20])
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x01")
    for name in ("cut.csv.gz", "binary.csv", "missing.csv"):
        with pytest.raises(ValidationError, match=f"cannot read the trace .*{name}"):
            read_trace(tmp_path / name)


def row(context, prefix_id, prefix_tokens):
    return TraceRow(context_tokens=context, generated_tokens=1, prefix_id=prefix_id, prefix_tokens=prefix_tokens)


@pytest.mark.parametrize(
    ("rows", "best"),
    [
        ([row(100, "a", 64)] * 3, 2 * 64),
        ([row(100, "a", 70)] * 3, 2 * 64),  # full pages only
        ([row(64, "a", 64)] * 3, 2 * 48),  # the last token is always computed
        ([row(100, "a", 64), row(100, "a", 32)], 32),
        ([row(100, "a", 64), row(100, "b", 64), row(100, None, 0)], 0),
    ],
)
def test_the_best_possible_saving(rows, best):
    assert best_saved_tokens(rows, 16) == best
