"""What a run has left behind, row by row: ids, not counts."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

MAX_SEQS = 32  # of each engine
CHECKPOINT_ROWS = 256  # a shard's finished rows that are not durable yet, at most


@dataclass(frozen=True, slots=True)
class Expected:
    """A job as it was submitted: the answer of each id, in input order, and tokens of each answer."""

    answers: Mapping[str, str]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Left:
    """What stands in a job's output: every name below it, its manifest, and its parts by name."""

    names: Sequence[str]
    manifest: Mapping[str, Any]
    parts: Mapping[str, pa.Table]


@dataclass(slots=True)
class Findings:
    """Sums over jobs; `violations` in words."""

    rows: int = 0
    distinct: int = 0
    missing: int = 0
    doubled: int = 0
    orphans: int = 0
    violations: list[str] = field(default_factory=list)


def examine(jobs: Mapping[str, tuple[Expected, Left]]) -> Findings:
    """Every job: each id once, with its answer, in input order; one schema; nothing that a glob sees but the parts."""
    findings = Findings()
    for name, (expected, left) in jobs.items():
        _examine_rows(name, expected, left, findings)
        _examine_files(name, left, findings)
    return findings


def _examine_rows(name: str, expected: Expected, left: Left, findings: Findings) -> None:
    visible = [left.parts[part] for part in sorted(left.parts)]
    ids = [row_id for table in visible for row_id in table["custom_id"].to_pylist()]
    seen = Counter(ids)
    missing = [row_id for row_id in expected.answers if row_id not in seen]
    doubled = [row_id for row_id, count in seen.items() if count > 1]
    findings.rows += len(ids)
    findings.distinct += len(seen)
    findings.missing += len(missing)
    findings.doubled += len(doubled)
    tell = findings.violations.append
    if missing:
        tell(f"{name}: {len(missing)} rows are missing, such as {missing[:3]}")
    if doubled:
        tell(f"{name}: {len(doubled)} rows are there more than once, such as {doubled[:3]}")
    if strange := [row_id for row_id in seen if row_id not in expected.answers]:
        tell(f"{name}: rows that nobody asked for, such as {strange[:3]}")
    if not missing and not doubled and not strange and ids != list(expected.answers):
        tell(f"{name}: rows are not in input order")
    if len({table.schema for table in visible}) > 1:
        tell(f"{name}: parts have different schemas")
    answers = [answer for table in visible for answer in table["completion"].to_pylist()]
    wrong = [i for i, a in zip(ids, answers, strict=True) if i in expected.answers and a != expected.answers[i]]
    if wrong:
        tell(f"{name}: {len(wrong)} rows have another answer than theirs, or an error, such as {wrong[:3]}")


def _examine_files(name: str, left: Left, findings: Findings) -> None:
    listed = {part["path"] for part in left.manifest.get("parts", [])}
    visible = {path for path in left.names if not path.startswith(("_", "."))}
    findings.orphans += len(visible - listed)
    if visible - listed:
        findings.violations.append(
            f"{name}: a glob sees {sorted(visible - listed)[:3]}, which the manifest does not list"
        )
    if listed - visible:
        findings.violations.append(f"{name}: the manifest lists {sorted(listed - visible)[:3]}, which are not there")
    if "_SUCCESS" not in left.names:
        findings.violations.append(f"{name}: no _SUCCESS")


def recomputed_rows(journals: Sequence[Path], needed_tokens: int, tokens_per_row: int) -> int:
    """Rows' worth of tokens that engines drew in vain: all that they drew, less what the answers have.

    Every engine writes a line per step, with how many sequences drew a token; a killed one has written its last step.
    """
    drawn = 0
    for journal in journals:
        for line in journal.read_text().splitlines():
            words = line.split()
            drawn += int(words[1]) if len(words) == 3 else 0
    return math.ceil(max(0, drawn - needed_tokens) / tokens_per_row)


def recompute_limit(kills: Mapping[str, int], held: Sequence[int]) -> int:
    """Guarantee 3: rows in flight of each lost engine, and one unflushed checkpoint of each shard of a lost worker.

    Args:
        kills: By target; an engine's loss costs what was in flight.
        held: For each worker that was killed: the shards at work in it.
    """
    return kills["engine"] * MAX_SEQS + sum(MAX_SEQS + shards * CHECKPOINT_ROWS for shards in held)


def load_manifest(data: bytes) -> dict[str, Any]:
    """Of `_manifest.json`."""
    manifest = json.loads(data)
    assert isinstance(manifest, dict)
    return manifest
