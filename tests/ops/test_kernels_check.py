"""The kernels compile for real GPUs, within their budget; and a kernel that should be refused is."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nightmill_kernels.check.budget import Allowance, Budget, budget_key
from nightmill_kernels.check.build import KernelBuild
from nightmill_kernels.check.rules import check_builds, gone_lines, unknown_versions
from nightmill_kernels.check.versions import VersionError, triton_dir

PLANTED = Path(__file__).parent / "planted"
BUDGET = Path(__file__).parents[2] / "bench" / "kernels" / "budget.json"
BUILD = KernelBuild(stem="stem", config="config", triton="3.7.1", arch=90, registers=56, shared_bytes=1024, wgmma=2)
ROW_KEYS = {"stem", "arch", "registers", "spills", "shared_bytes", "mma", "wgmma"}


def run_check(*arguments: str, pythonpath: str = "") -> subprocess.CompletedProcess[str]:
    # TRITON_INTERPRET is set here: the check has to do without it.
    paths = filter(None, [pythonpath, os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "nightmill_kernels.check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], dict[tuple[str, str], dict[str, Any]]]:
    """Findings, and rows by (stem, config), of the planted kernels."""
    scratch = tmp_path_factory.mktemp("check")
    arguments = ("--module", "planted_kernels", "--arch", "90", "--json", str(scratch / "rows.json"))
    done = run_check(*arguments, "--budget", str(scratch / "budget.json"), "--update", pythonpath=str(PLANTED))
    assert done.returncode == 1, done.stderr
    rows = json.loads((scratch / "rows.json").read_text())
    findings = [line.removeprefix("✗ ") for line in done.stderr.splitlines() if line.startswith("✗")]
    return findings, {(row["stem"], row["config"]): row for row in rows}


def test_every_kernel_of_the_product_passes_for_sm_90() -> None:
    done = run_check("--arch", "90", "--budget", str(BUDGET))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("attention [spills]", ("spills", "bytes", "allowed is 0", "more warps")),
        ("attention [shared memory]", ("bytes of shared memory", "has 232448", "fewer stages")),
        ("copy [no tensor cores]", ("no tensor-core instruction", "tl.dot")),
        ("copy [an argument short]", ("does not compile", "SpecError", "'out'")),
        ("copy [twice]", ("2 specs have this name",)),
        ("planted_kernels.forgotten_kernel", ("in no spec",)),
    ],
)
def test_a_planted_fault_is_refused(planted: Any, name: str, words: tuple[str, ...]) -> None:
    (finding,) = [finding for finding in planted[0] if finding.startswith(name)]
    for word in words:
        assert word in finding


def test_nothing_else_is_refused(planted: Any) -> None:
    assert len(planted[0]) == 6, planted[0]


def test_the_rows_say_what_the_compiler_made(planted: Any) -> None:
    rows = planted[1]
    assert all(row.keys() >= ROW_KEYS and row["arch"] == "sm_90" for row in rows.values())
    assert rows["matmul", "good"]["wgmma"] > 0
    assert 64 <= rows["attention", "good"]["registers"] <= 160
    assert rows["attention", "good"]["spills"] == 0 < rows["attention", "spills"]["spills"]
    assert rows["attention", "good"]["cp_async"] > 0
    assert rows["copy", "good"]["loads_128"] > 0 == rows["copy", "unaligned"]["loads_128"]
    assert ("copy", "sm_100 only") not in rows
    assert rows["copy", "by architecture"]["loads_128"] == rows["copy", "good"]["loads_128"], (
        "another GPU's was compiled"
    )


def test_a_budget_is_exact_and_one_way(tmp_path: Path) -> None:
    Budget({}).updated([BUILD]).write(tmp_path / "budget.json")
    budget = Budget.read(tmp_path / "budget.json")
    assert not list(check_builds([BUILD, replace(BUILD, registers=55, shared_bytes=0)], budget))
    (finding,) = check_builds([replace(BUILD, registers=57)], budget)
    assert "stem [config] for sm_90 by triton 3.7.1: 57 registers, the budget allows 56" in finding
    (finding,) = check_builds([replace(BUILD, shared_bytes=1025)], budget)
    assert "1025 bytes of shared memory, the budget allows 1024" in finding
    (finding,) = check_builds([replace(BUILD, config="new")], budget)
    assert "not in the budget" in finding


def test_spills_are_let_in_by_hand_only(tmp_path: Path) -> None:
    spilling = replace(BUILD, spills=8)
    budget = Budget({}).updated([spilling])
    assert len(list(check_builds([spilling], budget))) == 1
    by_hand = Budget({budget_key(spilling): Allowance(spilling.registers, spilling.shared_bytes, spills=8)})
    by_hand.write(tmp_path / "budget.json")
    kept = Budget.read(tmp_path / "budget.json").updated([spilling])
    assert not list(check_builds([spilling], kept))
    assert "allowed is 8" in next(iter(check_builds([replace(spilling, spills=12)], kept)))
    assert list(check_builds([spilling], kept.updated([BUILD])))  # once it does without, it has to stay so


def test_a_line_without_its_kernel_is_a_finding() -> None:
    budget = Budget({budget_key(replace(BUILD, config="old", arch=arch)): Allowance(1, 1) for arch in (80, 90)})
    (finding,) = gone_lines([BUILD], budget)
    assert finding.startswith("stem [old] for sm_90")  # sm_80 was not built: nothing is known of it
    assert not list(gone_lines([BUILD], budget.updated([BUILD])))
    assert budget.updated([BUILD], is_all=False).allowances.keys() == {*budget.allowances, budget_key(BUILD)}
    assert budget.updated([BUILD]).allowances.keys() == {
        budget_key(BUILD),
        budget_key(replace(BUILD, config="old", arch=80)),
    }


def test_a_version_without_any_budget_is_said_not_refused() -> None:
    other = replace(BUILD, triton="3.8.0")
    budget = Budget({}).updated([BUILD])
    assert unknown_versions([BUILD, other], budget) == ["3.8.0"]
    assert not list(check_builds([other], budget))
    assert list(check_builds([replace(other, spills=4)], budget))


@pytest.mark.parametrize(("arch", "limit"), [(80, 163 * 1024), (90, 227 * 1024), (100, 227 * 1024), (120, 99 * 1024)])
def test_shared_memory_has_a_limit_by_architecture(arch: int, limit: int) -> None:
    at_limit = replace(BUILD, arch=arch, shared_bytes=limit)
    assert not list(check_builds([at_limit], Budget({})))
    assert list(check_builds([replace(at_limit, shared_bytes=limit + 1)], Budget({})))


def test_a_worker_that_dies_is_said_with_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "broken_kernels.py").write_text("raise RuntimeError('no such luck')\n")
    done = run_check("--module", "broken_kernels", pythonpath=str(tmp_path))
    assert done.returncode == 2
    assert "no such luck" in done.stderr


def test_a_version_must_look_like_one() -> None:
    with pytest.raises(VersionError, match=r"like 3\.6\.0"):
        triton_dir("3.6.0 --index-url elsewhere")
