"""`nightmill bench --write-workloads`: other engines' runners get the very rows that published figures are about."""

import hashlib
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from nightmill.cli.main import cli
from nightmill_worker.bench.workload import REFERENCE_SHA256

pytestmark = pytest.mark.demo_model


def test_files_are_those_of_the_published_figures(demo_model_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    result = CliRunner().invoke(cli, ["bench", "--write-workloads", str(folder), "--model", str(demo_model_dir)])
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in folder.iterdir()) == ["W0.jsonl", "W1.jsonl", "W2.jsonl", "W3.jsonl"]
    for name, expected in REFERENCE_SHA256.items():
        content = (folder / f"{name}.jsonl").read_bytes()
        assert hashlib.sha256(content).hexdigest()[:16] == expected
        assert f"{name}.jsonl" in result.stdout
        assert expected in result.stdout
    rows = [json.loads(line) for line in (folder / "W1.jsonl").read_text().splitlines()]
    assert len(rows) == 256
    assert len({tuple(row["prompt_ids"][:384]) for row in rows}) == 1
    assert sum(row["max_tokens"] for row in rows) == 9158
