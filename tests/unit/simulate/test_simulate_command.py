import json

import pytest
from click.testing import CliRunner

from nightmill_worker.cli.simulate import simulate

KEYS = {
    "steps",
    "seconds",
    "output_tokens",
    "mean_batch",
    "page_occupancy_mean",
    "preemptions",
    "recomputed_tokens",
    "prefill_tokens_computed",
    "prefill_tokens_saved",
    "prefill_tokens_saved_best",
    "wait_s",
    "bound_seconds",
}


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("ContextTokens,GeneratedTokens,Tier\n" + "100,20,high\n30,200,low\n" * 20)
    return path


def call(*arguments):
    return CliRunner().invoke(simulate, [str(a) for a in arguments], catch_exceptions=False)


def test_json_on_stdout_has_an_object_per_policy(trace):
    result = call("--trace", trace, "--policy", "both", "--max-num-seqs", 8, "--device", "cpu", "--json", "-")
    assert result.exit_code == 0
    figures = json.loads(result.stdout)
    assert list(figures) == ["static", "continuous"]
    for each in figures.values():
        assert set(each) >= KEYS
        assert set(each["wait_s"]) == {"high", "low"}
        assert set(each["wait_s"]["high"]) == {"p50", "p99"}
    assert figures["static"]["steps"] == 5 * 200


def test_files(trace, tmp_path):
    out = {name: tmp_path / name for name in ("f.json", "p.svg", "e.csv", "e.static.csv")}
    result = call(
        "--trace", trace, "--policy", "both", "--json", out["f.json"], "--plot", out["p.svg"], "--events", out["e.csv"]
    )
    assert result.exit_code == 0
    assert "device hours" in result.stdout
    assert json.loads(out["f.json"].read_text())["continuous"]["output_tokens"] == 4400
    assert out["p.svg"].read_text().startswith("<?xml")
    for name in ("e.csv", "e.static.csv"):
        assert len(out[name].read_text().splitlines()) == 41


def test_one_policy_writes_the_events_file_it_was_given(trace, tmp_path):
    assert call("--trace", trace, "--policy", "static", "--events", tmp_path / "e.csv").exit_code == 0
    assert (tmp_path / "e.csv").exists()
