"""The judge of chaos runs: it finds each thing that may be wrong, and nothing where nothing is."""

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.chaos.ledger import CheckpointLedger
from tests.chaos.plan import KINDS, Fault, Target, draw_events
from tests.chaos.verdict import CHECKPOINT_ROWS, MAX_SEQS, Expected, Left, examine, recompute_limit, recomputed_rows

from deploy.native.faulty_s3 import SeenRequest

EXPECTED = Expected({f"id-{i}": f"answer {i}" for i in range(6)}, max_tokens=4)


def _part(*rows: int, **changed: object) -> pa.Table:
    columns = {"custom_id": [f"id-{i}" for i in rows], "completion": [f"answer {i}" for i in rows]}
    return pa.table(columns | changed)


LEFT = Left(
    names=["part-0.parquet", "part-1.parquet", "_manifest.json", "_SUCCESS", "_nightmill/job/job.json"],
    manifest={"parts": [{"path": "part-0.parquet"}, {"path": "part-1.parquet"}]},
    parts={"part-0.parquet": _part(0, 1, 2), "part-1.parquet": _part(3, 4, 5)},
)


def test_nothing_is_said_of_what_is_right() -> None:
    findings = examine({"job": (EXPECTED, LEFT)})
    assert findings.violations == []
    assert (findings.rows, findings.distinct, findings.missing, findings.doubled, findings.orphans) == (6, 6, 0, 0, 0)


def _with(part: pa.Table) -> Left:
    return replace(LEFT, parts=LEFT.parts | {"part-1.parquet": part})


PLANTED: dict[str, tuple[Callable[[], Left], str, tuple[int, int, int]]] = {
    "lost row": (lambda: _with(_part(3, 5)), "1 rows are missing, such as ['id-4']", (1, 0, 0)),
    "doubled row": (lambda: _with(_part(3, 4, 4, 5)), "1 rows are there more than once", (0, 1, 0)),
    "lost and doubled, so that the count is right": (lambda: _with(_part(3, 3, 5)), "more than once", (1, 1, 0)),
    "disorder": (lambda: _with(_part(3, 5, 4)), "not in input order", (0, 0, 0)),
    "foreign row": (lambda: _with(_part(3, 4, 5, 77)), "nobody asked for", (0, 0, 0)),
    "another's answer": (lambda: _with(_part(3, 4, 5, completion=["answer 3", "answer 3", None])), "2 rows", (0, 0, 0)),
    "schema": (lambda: _with(_part(3, 4, 5, error_code=[None] * 3)), "different schemas", (0, 0, 0)),
    "orphan": (lambda: replace(LEFT, names=[*LEFT.names, "part-1-a2.parquet"]), "a glob sees", (0, 0, 1)),
    "part gone": (lambda: replace(LEFT, names=LEFT.names[1:]), "which are not there", (0, 0, 0)),
    "no end": (lambda: replace(LEFT, names=LEFT.names[:3]), "no _SUCCESS", (0, 0, 0)),
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_wrong_is_said(name: str) -> None:
    make, said, (missing, doubled, orphans) = PLANTED[name]
    findings = examine({"job": (EXPECTED, make())})
    assert any(said in violation for violation in findings.violations), findings.violations
    assert (findings.missing, findings.doubled, findings.orphans) == (missing, doubled, orphans)


def test_tokens_drawn_in_vain_are_counted_as_rows(tmp_path: Path) -> None:
    first, second = tmp_path / "journal-0", tmp_path / "journal-1"
    first.write_text("1.0 6 6\n1.1 6 0\n1.2 6 0\n1.3 6 0\n")
    second.write_text("2.0 2 2\n2.1 1 0\n2.2 1")  # killed in the middle of a line
    assert recomputed_rows([first, second], needed_tokens=24, tokens_per_row=4) == 1
    assert recomputed_rows([first], needed_tokens=24, tokens_per_row=4) == 0


def test_a_drain_or_a_restart_of_a_server_allows_no_recomputation() -> None:
    kills = {target.value: 3 for target in Target} | {"engine": 0}
    assert recompute_limit(kills, held=[]) == 0
    assert recompute_limit(kills | {"engine": 2}, held=[3]) == 3 * MAX_SEQS + 3 * CHECKPOINT_ROWS


def test_a_plan_is_the_seeds_and_leaves_out_nothing() -> None:
    events = draw_events(7, 90)
    assert events == draw_events(7, 90) != draw_events(8, 90)
    assert {(event.target, event.fault) for event in events} == {(t, f) for t, kinds in KINDS.items() for f in kinds}
    assert all(0 < event.at_s < 90 for event in events)
    assert {event.target for event in draw_events(7, 10)} == set(Target)
    assert Fault.WIPE in KINDS[Target.BROKER]


def _seen(method: str, path: str) -> SeenRequest:
    return SeenRequest(method, path, {}, None)


def _checkpoint(ledger: CheckpointLedger, attempt: int, rows: list[int], status: int = 200) -> None:
    body = io.BytesIO()
    pq.write_table(pa.table({"row_index": rows}), body)
    path = f"/bucket/run/bulk-out/_nightmill/job-1/shard-00007/ckpt-{attempt}-0.parquet"
    ledger.observe(_seen("PUT", path), body.getvalue(), status)


def _look(ledger: CheckpointLedger) -> None:
    prefix = "run%2Fbulk-out%2F_nightmill%2Fjob-1%2Fshard-00007%2F"
    ledger.observe(_seen("GET", f"/bucket?list-type=2&prefix={prefix}&max-keys=1000"), b"", 200)


def test_durable_rows_that_are_computed_again_are_found() -> None:
    ledger, last = CheckpointLedger(), {("job-1", 7): 2, ("job-1", 8): 1}
    _look(ledger)
    _checkpoint(ledger, 1, [1, 2, 3])
    _checkpoint(ledger, 1, [9], status=412)  # was not accepted, so it is not durable
    _look(ledger)
    _checkpoint(ledger, 1, [4, 5])  # of a zombie, after the second had looked: may be computed again
    _checkpoint(ledger, 2, [4, 5, 6, 9])
    assert ledger.durable_rows_computed_again(last) == 0
    _checkpoint(ledger, 2, [3])
    assert ledger.durable_rows_computed_again(last) == 1
