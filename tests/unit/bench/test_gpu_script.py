"""`make gpu` where there is no GPU: the script runs, loses nothing to a section that dies, and never sells guesses."""

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from bench.gpu import __main__ as script
from bench.gpu.bound import bound_seconds, decode_seconds
from bench.gpu.conductor import TINY_PATIENCE, Conductor, Ending, Outcome
from bench.gpu.facts import NO_DEVICE, Facts
from bench.gpu.notebook import Check, Figure, Findings
from bench.gpu.report import Report, doubts
from bench.gpu.section import ASSUMED, SECTIONS, Section
from bench.gpu.sections.profile import OURS
from bench.gpu.workloads import W4_TOKENS_IN, W4_TOKENS_OUT, steady_rows, w4_rows

import nightmill_kernels.gpu
from nightmill_worker.simulate.cost_model import MODELS, CostModel

ROOT = Path(__file__).parents[3]
LEAVES_A_CHILD = """
import subprocess, sys
def run(notebook, task):
    notebook.figure("found", 7.0, "things", headline=True)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (task.folder / "child.pid").write_text(str(child.pid))
    import time
    while True:
        time.sleep(60)
"""
SECTION_CODE = {
    "good": "def run(notebook, task):\n    notebook.figure('speed', 3.0, 'tok/s', headline=True)\n"
    "    notebook.check('right', True)\n",
    "raises": "def run(notebook, task):\n    notebook.figure('half', 1.0, 'x')\n"
    "    raise RuntimeError('out of luck')\n",
    "dies": "import os\ndef run(notebook, task):\n    print('about to die', flush=True)\n    os._exit(9)\n",
    "wrong": "def run(notebook, task):\n    notebook.figure('fast', 9.0, 'tok/s', headline=True)\n"
    "    notebook.check('right', False, '3 rows differ')\n",
    "hangs": LEAVES_A_CHILD,
}

WITHOUT_PACKAGES = """
from importlib.machinery import PathFinder
MISSING = ("celery", "kombu", "amqp", "sqlalchemy", "alembic", "boto3", "botocore", "psycopg", "click", "gguf")
class Find:
    find = PathFinder.find_spec
    def __call__(self, name, *rest):
        return None if name.partition(".")[0] in MISSING else self.find(name, *rest)
PathFinder.find_spec = Find()
"""


@pytest.fixture
def sections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Section]:
    for name, code in SECTION_CODE.items():
        (tmp_path / f"gpu_section_{name}.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    limits = {"hangs": 9.0 / TINY_PATIENCE}
    return {
        name: Section(name=name, module=f"gpu_section_{name}", what=name, limit_s=limits.get(name, 60))
        for name in (*SECTION_CODE, "missing")
    }


def conduct(folder: Path, sections: list[Section], deadline_s: float = 300) -> tuple[list[Outcome], Report]:
    report = Report(facts=facts("NVIDIA Test"), bounds=[], is_tiny=True, folder=folder)
    conductor = Conductor(folder=folder, is_tiny=True, deadline_s=deadline_s, report=report.save)
    return conductor.run(sections), report


def facts(device: str) -> Facts:
    return Facts(
        device=device, driver="0", cpu="c", num_cpus=1, python="3", versions={"torch": "2"}, commit="abc", command="x"
    )


def test_a_section_that_raises_dies_hangs_or_is_not_there_loses_nothing(
    tmp_path: Path, sections: dict[str, Section]
) -> None:
    order = ["raises", "dies", "hangs", "missing", "wrong", "good"]
    outcomes, report = conduct(tmp_path, [sections[name] for name in order])
    endings = {o.section.name: o.ending for o in outcomes}
    assert endings == {
        "raises": Ending.FAILED,
        "dies": Ending.FAILED,
        "hangs": Ending.KILLED,
        "missing": Ending.FAILED,
        "wrong": Ending.FAILED,
        "good": Ending.DONE,
    }
    by_name = {o.section.name: o for o in outcomes}
    assert "RuntimeError: out of luck" in by_name["raises"].findings.checks[0].detail
    assert by_name["raises"].findings.figures[0].name == "half"
    assert "about to die" in by_name["dies"].findings.checks[0].detail
    assert by_name["hangs"].findings.figures[0].value == 7.0
    assert "gpu_section_missing" in by_name["missing"].findings.checks[0].detail
    assert not _is_running(int((tmp_path / "child.pid").read_text())), "its child went with it"
    saved = json.loads((tmp_path / "results.json").read_text())
    assert [s["name"] for s in saved["sections"]] == order
    assert not saved["measured"]
    last = "\n".join(report.last_table(outcomes))
    assert "speed: 3 tok/s" in last
    assert "fast: 9 tok/s  [its own checks failed]" in last
    assert len(last) < 4000


def _is_running(pid: int) -> bool:
    """False for one that is dead and not reaped: in a container nobody may do that."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_what_no_time_is_left_for_is_said(tmp_path: Path, sections: dict[str, Section]) -> None:
    outcomes, report = conduct(tmp_path, [sections["good"]], deadline_s=5)
    assert outcomes[0].ending is Ending.NOT_RUN
    assert "not run" in "\n".join(report.markdown(outcomes))


def test_figures_that_rely_on_a_failed_section_say_so() -> None:
    ops = Section(name="ops", module="", what="", limit_s=1)
    speed = Section(name="speed", module="", what="", limit_s=1, relies_on=("ops", "parity"))

    def outcome(section: Section, *, passed: bool) -> Outcome:
        found = Findings(figures=[Figure(name="f", value=1.0, unit="x")], checks=[Check(name="c", passed=passed)])
        return Outcome(section=section, ending=Ending.DONE if passed else Ending.FAILED, seconds=1, findings=found)

    outcomes = [outcome(ops, passed=False), outcome(speed, passed=True)]
    assert doubts(outcomes[1], outcomes) == "ops failed, parity not run"
    assert doubts(outcomes[0], outcomes) == "its own checks failed"
    assert doubts(outcomes[1], [outcome(ops, passed=True), outcomes[1]]) == "parity not run"
    report = Report(facts=facts("NVIDIA Test"), bounds=[], is_tiny=False, folder=Path())
    assert "**Not to be relied on: ops failed, parity not run.**" in "\n".join(report.markdown(outcomes))


def test_without_a_gpu_it_says_so_and_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "gather_facts", lambda commit, command: facts(NO_DEVICE))
    assert script.main(["--out", str(tmp_path)]) == 1
    text = (tmp_path / "RESULTS.md").read_text()
    assert "Not measured on a device" in text
    assert "W4 (256 rows, 100-1,024 in and out) | qwen3-0.6b" in text
    assert "not measured on a device" in capsys.readouterr().err
    (tmp_path / "results.json").write_text('{"measured": true}')
    (tmp_path / "RESULTS.md").write_text("42 tok/s")
    assert script.main(["--out", str(tmp_path)]) == 1
    assert (tmp_path / "RESULTS.md").read_text() == "42 tok/s"


def test_w4_is_the_published_one() -> None:
    rows = w4_rows()
    assert sum(len(row.prompt) for row in rows) == W4_TOKENS_IN == 142_827
    assert sum(row.max_tokens for row in rows) == W4_TOKENS_OUT == 133_966
    assert rows[0].prompt[:3] == (6311, 6890, 663)
    assert [row.max_tokens for row in rows[:3]] == [845, 312, 607]


def test_bounds_are_those_of_the_benchmarks_page() -> None:
    """On an H200 (4.3 TB/s, 790 TFLOP/s), in thousands of output tokens per second and in ms."""
    expected = {"qwen3-0.6b": (36.2, 23.4, 7.38), "llama-3.1-8b": (13.3, 12.1, 12.9)}
    for name, (w4, w5, step_ms) in expected.items():
        cost = CostModel(ASSUMED.device, MODELS[name])
        rows = w4_rows()
        assert W4_TOKENS_OUT / bound_seconds(cost, rows) / 1e3 == pytest.approx(w4, abs=0.06)
        rows = steady_rows(3000)
        assert 3e6 / bound_seconds(cost, rows) / 1e3 == pytest.approx(w5, abs=0.06)
        assert decode_seconds(cost, 256, 1024) * 1e3 == pytest.approx(step_ms, abs=0.05)


def test_every_section_works_on_tiny_shapes(tmp_path: Path) -> None:
    """As on a rented machine: nothing of ours installed, no services' packages to be had, no plugin of this suite."""
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "sitecustomize.py").write_text(WITHOUT_PACKAGES)
    paths = [str(blocked), *(str(ROOT / path) for path in ("jobs", "worker", "kernels", "."))]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "bench.gpu", "--tiny", "--out", str(tmp_path / "out"), "--commit", "abc"]
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    wrong = [line for line in ended.stdout.splitlines() if "FAILED" in line]
    assert ended.returncode == 0, "\n".join(wrong) + ended.stdout[-2000:] + ended.stderr[-2000:]
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert len(files) <= 8
    assert {"results.json", "RESULTS.md"} <= set(files)
    saved = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [(s["name"], s["ending"]) for s in saved["sections"]] == [(s.name, "done") for s in SECTIONS]
    assert all(check["passed"] for section in saved["sections"] for check in section["checks"])
    assert saved["facts"]["commit"] == "abc"
    assert "tiny shapes on a CPU" in (tmp_path / "out" / "RESULTS.md").read_text()
    assert ended.stdout.rstrip().splitlines()[-1].startswith(SECTIONS[-1].name)  # the table is last


def test_every_kernel_of_ours_has_a_place_in_the_profile() -> None:
    """A renamed or new kernel would be counted as somebody else's."""
    for module in pkgutil.iter_modules(nightmill_kernels.gpu.__path__, "nightmill_kernels.gpu."):
        for spec in getattr(importlib.import_module(module.name), "specs", list)():
            assert spec.kernel.fn.__name__ in OURS
