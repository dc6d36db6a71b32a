"""Prompt lengths in `nightmill validate`: tokens with the model's tokenizer, characters without."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from tests.integration.fake_model import make_tokenizer

from nightmill.cli.lengths import count_characters, show_lengths
from nightmill.cli.main import cli
from nightmill.errors import ExitCode
from nightmill.rows import InputRow
from nightmill.sampling import SamplingParams
from nightmill.validate import TokenLengths


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": ["100 200 300", None, "100", "100 " * 9]}), path)
    return path


def lengths(*arguments: Any) -> tuple[dict[str, Any], str]:
    result = CliRunner().invoke(cli, ["validate", *map(str, arguments), "--json"])
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)["lengths"]
    return found, result.stderr


def test_tokens_are_those_of_the_model(source: Path, tmp_path: Path) -> None:
    found, talk = lengths(source, "--model", make_tokenizer(tmp_path / "model"))
    assert (found["unit"], found["num_rows"], found["minimum"], found["maximum"], found["total"]) == (
        *("tokens", 3, 1, 9),
        13,
    )
    assert found["histogram"] == [[1, 1], [4, 1], [16, 1]]
    assert talk == ""


def test_the_template_and_the_system_prompt_count(source: Path, tmp_path: Path) -> None:
    model = make_tokenizer(tmp_path / "model", chat=True)
    found, _ = lengths(source, "--model", model, "--system-prompt", "7 7")
    assert found["total"] == 13 + 3 * 2
    found, _ = lengths(source, "--model", model, "--no-chat")
    assert found["total"] == 13


def test_without_a_model_lengths_are_characters(source: Path) -> None:
    found, talk = lengths(source)
    assert (found["unit"], found["minimum"], found["maximum"]) == ("characters", 3, 36)
    assert talk == ""


def test_without_the_worker_lengths_are_characters_and_that_is_said(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Point:
        def load(self) -> None:
            raise ModuleNotFoundError("No module named 'tokenizers'", name="tokenizers")

    for points in ([], [Point()]):
        monkeypatch.setattr("importlib.metadata.entry_points", lambda points=points, **_: points)
        found, talk = lengths(source, "--model", make_tokenizer(tmp_path / "model"))
        assert found["unit"] == "characters"
        assert "pip install 'nightmill[worker]'" in talk


def test_a_model_that_is_not_there_is_exit_3(source: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["validate", str(source), "--model", str(tmp_path / "none")])
    assert (result.exit_code, "none" in result.stderr) == (ExitCode.VALIDATION, True)


def test_characters_of_messages_are_those_of_their_texts() -> None:
    messages = [
        {"role": "system", "content": "abc"},
        {"role": "user", "content": [{"type": "text", "text": "defg"}, {"type": "text", "text": "h"}]},
    ]
    row = InputRow(row_index=0, custom_id="x", messages=messages, sampling=SamplingParams(), seed=0)
    assert count_characters([row]) == [8]


def test_the_histogram_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    histogram = tuple((1 << power, 10**power % 9_999_991) for power in range(20))
    show_lengths("characters", TokenLengths(
        num_rows=10_000_000, total=10**12, minimum=1, median=512, p95=131_072, maximum=524_288, histogram=histogram
    ))  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[2:])) <= 80
    assert all("█" in line for line in lines[2:])
