"""`make bench-rivals` without rivals: its driver with a named fake engine, and what it makes of the figures."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench.rivals import venv
from bench.rivals.crew import Crew
from bench.rivals.engine_process import EngineError, EngineProcess
from bench.rivals.machine_watch import MachineWatch, Reading, Usage
from bench.rivals.materials import Materials
from bench.rivals.report import Report
from bench.rivals.rival import PipInstall, Rival, Run
from bench.rivals.session import Entrant, Limits, Session, Task
from bench.rivals.standing import cells_of, verdicts_of
from bench.rivals.venv import InstallError, ready_venv, wanted

from nightmill_worker.bench.roofline import Bound
from nightmill_worker.bench.workload import Workload, WorkloadRow, canonical_lines

ROWS = (WorkloadRow((5, 6, 7), 4, 1), WorkloadRow((5, 8), 6, 1), WorkloadRow((5,), 2, 1))
OURS = "nightmill"


class ScriptedWatch(MachineWatch):
    """A machine on which others take as many cores as the test says, run after run."""

    def __init__(self, others: list[float] | None = None, *, is_quiet: bool = True) -> None:
        super().__init__()
        self.others, self.is_quiet, self.waits = others or [], is_quiet, 0

    __slots__ = ("is_quiet", "others", "waits")

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def read(self, pid: int) -> Reading:
        return Reading(0.0, 0.0, 0.0, 0.0)

    def usage(self, before: Reading, after: Reading) -> Usage:
        return Usage(1.0, 1.9, self.others.pop(0) if self.others else 0.0, 0.0)

    def wait_until_quiet(self, limit_s: float) -> bool:
        self.waits += 1
        return self.is_quiet

    def peak_rss_bytes(self, pid: int) -> int:
        return 1_000_000_000


@pytest.fixture
def task(tmp_path: Path) -> Task:
    workload = Workload("W1", ROWS, sha256="f" * 64)
    file = tmp_path / "W1.jsonl"
    file.write_text("".join(f"{line}\n" for line in canonical_lines("W1", ROWS, lambda ids: str(list(ids)))))
    return Task(workload, file)


@pytest.fixture
def entrant(tmp_path: Path, task: Task) -> Any:
    started: list[EngineProcess] = []

    def make(name: str, *, rounds: int | None = None, rows: dict[str, int] | None = None, **settings: Any) -> Entrant:
        given = {"seconds": 0.0, "warm_up": str(task.file), "warm_up_rows": 1, "max_num_seqs": 2} | settings
        rival = Rival(
            name=name, what="a fake", script="fake_child.py", model="", settings=given, rounds=rounds, rows=rows or {}
        )
        process = EngineProcess(
            name=name,
            python=Path(sys.executable),
            script=rival.script,
            settings=given,
            environment=os.environ,
            log=tmp_path / f"{name}.log",
        )
        started.append(process)
        return Entrant(rival, process)

    yield make
    for process in started:
        process.stop()


def session_of(entrants: list[Entrant], task: Task, watch: MachineWatch | None = None, **limits: Any) -> Session:
    said: list[str] = []
    session = Session(
        entrants=entrants,
        tasks=[task],
        limits=Limits(**({"rounds": 1, "start_s": 30, "run_s": 30} | limits)),
        watch=watch or ScriptedWatch(),
        say=said.append,
    )
    session.said = said  # type: ignore[attr-defined]
    return session


def test_engines_take_turns_and_another_one_begins_each_round(entrant: Any, task: Task) -> None:
    session = session_of([entrant(OURS), entrant("a"), entrant("b")], task, rounds=3)
    session.run()
    order = [(run.round, run.rival) for run in session.runs]
    assert order == [
        *((1, name) for name in (OURS, "a", "b")),
        *((2, name) for name in ("a", "b", OURS)),
        *((3, name) for name in ("b", OURS, "a")),
    ]
    assert session.rounds_done == 3
    assert all(run.detail["runs"] == run.round for run in session.runs), "one process answered all rounds"
    assert {run.output_tokens for run in session.runs} == {12}
    assert {run.prompt_tokens for run in session.runs} == {6}


def test_a_run_that_others_disturbed_is_repeated_and_the_quietest_counts(entrant: Any, task: Task) -> None:
    watch = ScriptedWatch([0.5, 0.9, 0.4, 0.0])
    session = session_of([entrant(OURS), entrant("a")], task, watch, tries=3)
    session.run()
    ours, other = session.runs
    assert (ours.attempt, ours.other_cores, ours.is_disturbed) == (3, 0.4, True)
    assert (other.attempt, other.is_disturbed) == (1, False)
    assert watch.waits == 4


def test_it_runs_on_a_machine_that_never_gets_quiet_and_says_so(entrant: Any, task: Task) -> None:
    session = session_of([entrant(OURS)], task, ScriptedWatch(is_quiet=False))
    session.run()
    assert len(session.runs) == 1
    assert any("do not leave the machine alone" in line for line in session.said)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("fault", "limits", "reason"),
    [
        ("load", {}, "did not load: RuntimeError: no such model"),
        ("crash", {}, "exit code 7"),
        ("hang", {"run_s": 0.3}, "no answer within 0 s; killed"),
    ],
)
def test_an_engine_that_fails_is_out_and_the_rest_goes_on(
    entrant: Any, task: Task, fault: str, limits: dict[str, Any], reason: str
) -> None:
    broken = entrant("broken", fault=fault)
    session = session_of([entrant(OURS), broken], task, rounds=2, **limits)
    session.run()
    assert [run.rival for run in session.runs] == [OURS, OURS]
    assert reason in session.failures["broken"]


def test_engines_end_with_the_session(entrant: Any, task: Task) -> None:
    one = entrant(OURS)
    pids: list[int] = []
    session = session_of([one], task)
    session.after_round = lambda: pids.append(one.process.pid)
    session.run()
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_rows_of_the_wrong_length_are_counted_by_the_driver_and_void_the_figure(entrant: Any, task: Task) -> None:
    session = session_of([entrant(OURS, seconds=0.2), entrant("a", fault="short"), entrant("b", seconds=0.4)], task)
    session.run()
    assert [run.rows_wrong_length for run in session.runs] == [0, 1, 0]
    cells = cells_of(session.runs, OURS, {})
    assert not next(cell for cell in cells if cell.rival == "a").is_valid
    assert verdicts_of(cells, session.runs, OURS)[0].best_rival == "b", "a void figure beats nobody"


def test_an_engine_with_another_model_is_void(entrant: Any, task: Task) -> None:
    session = session_of([entrant(OURS), entrant("a", first_token=1), entrant("b", first_token=2)], task)
    session.run()
    cells = {cell.rival: cell for cell in cells_of(session.runs, OURS, {})}
    assert [cells[name].same_first_token for name in (OURS, "a", "b")] == [None, 1.0, 0.0]
    assert [cells[name].is_valid for name in (OURS, "a", "b")] == [True, True, False]


def test_a_slow_engine_runs_fewer_rounds_and_rows_and_is_no_best_rival(entrant: Any, task: Task) -> None:
    session = session_of([entrant(OURS), entrant("slow", rounds=1, rows={"W1": 2, "W2": 1})], task, rounds=2)
    session.run()
    slow = [run for run in session.runs if run.rival == "slow"]
    assert [(run.round, run.rows, run.is_whole) for run in slow] == [(1, 2, False)]
    cells = cells_of(session.runs, OURS, {"W1": Bound(sum_s=1.0, overlap_s=1.0, steps=6)})
    cell = next(cell for cell in cells if cell.rival == "slow")
    assert (cell.bound_share, cell.overlap_share, cell.ahead) == (None, None, None)
    assert verdicts_of(cells, session.runs, OURS)[0].best_rival is None


def test_a_limit_holds_for_all_and_they_stay_comparable(entrant: Any, task: Task) -> None:
    session = session_of([entrant(OURS), entrant("a")], task, rows=2)
    session.run()
    assert {(run.rows, run.output_tokens, run.is_whole) for run in session.runs} == {(2, 10, False)}
    cells = cells_of(session.runs, OURS, {})
    assert verdicts_of(cells, session.runs, OURS)[0].best_rival == "a"
    assert cells[1].ahead is not None


def test_no_round_begins_that_would_not_end_in_time(entrant: Any, task: Task) -> None:
    session = session_of([entrant(OURS, seconds=0.2)], task, rounds=5, minutes=0.001)
    session.run()
    assert session.rounds_done == 1


def test_a_silent_child_is_killed_with_what_it_started(entrant: Any, task: Task) -> None:
    process = entrant("a", load_s=60).process
    with pytest.raises(EngineError, match="no answer within"):
        process.start(limit_s=0.2)
    with pytest.raises(EngineError, match="is not running"):
        process.pid  # noqa: B018


def test_what_an_engine_prints_goes_to_its_log(entrant: Any, tmp_path: Path) -> None:
    process = entrant("a").process
    ready = process.start(limit_s=30)
    assert ready.versions == {"fake": "1.0"}
    assert 0 <= ready.load_s <= ready.start_s
    assert "may print what it likes" in (tmp_path / "a.log").read_text()


def run_of(rival: str, number: int, rate: float, **changes: Any) -> Run:
    run = Run(
        rival=rival,
        workload="W1",
        round=number,
        attempt=1,
        rows=3,
        is_whole=True,
        prompt_tokens=6,
        output_tokens=120,
        seconds=120 / rate,
        cpu_s=1.0,
        other_cores=0.0,
        steal_cores=0.0,
        is_disturbed=False,
        peak_rss_bytes=1,
        rows_wrong_length=0,
        same_first_token=None if rival == OURS else 1.0,
        detail={},
    )
    return replace(run, **changes)


def test_medians_ranges_ratios_and_shares_of_the_bound() -> None:
    rates = {OURS: (30.0, 60.0, 40.0), "a": (20.0, 50.0, 10.0), "b": (25.0, 24.0, 26.0)}
    runs = [run_of(name, i + 1, rate) for name, found in rates.items() for i, rate in enumerate(found)]
    cells = {cell.rival: cell for cell in cells_of(runs, OURS, {"W1": Bound(sum_s=1.5, overlap_s=1.0, steps=9)})}
    ours, b = cells[OURS], cells["b"]
    assert (ours.tokens_per_s, ours.lowest, ours.highest) == pytest.approx((40.0, 30.0, 60.0))
    assert ours.bound_share == pytest.approx(1.5 / (120 / 40))
    assert ours.overlap_share == pytest.approx(1.0 / (120 / 40))
    assert ours.ahead is None
    assert b.ahead == pytest.approx(40 / 25)
    (verdict,) = verdicts_of(list(cells.values()), runs, OURS)
    assert verdict.best_rival == "b", "the best median, not the best single run"
    assert verdict.ratio == pytest.approx(40 / 25)
    assert (verdict.lowest_ratio, verdict.highest_ratio) == pytest.approx((30 / 25, 60 / 24))


def test_the_bound_is_one_of_the_machine_not_of_the_engine(entrant: Any, task: Task) -> None:
    cells = cells_of([run_of("a", 1, 20.0)], OURS, {"W1": Bound(sum_s=3.0, overlap_s=2.0, steps=9)})
    assert cells[0].bound_share == pytest.approx(0.5)
    assert verdicts_of(cells, [], OURS)[0].ratio is None, "nothing to compare with"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A /proc of a machine with processes 10 → 11 → 12 and others."""
    root = tmp_path / "proc"
    for pid, below in ((10, "11"), (11, "12"), (12, "")):
        folder = root / str(pid) / "task" / str(pid)
        folder.mkdir(parents=True)
        (folder / "children").write_text(below)
    write_ticks(root, busy=0, tree=0, steal=0)
    for pid, peak in ((10, 1000), (11, 500), (12, 24)):
        (root / str(pid) / "status").write_text(f"Name:\tx\nVmHWM:\t  {peak} kB\nVmRSS:\t 1 kB\n")
    return root


def write_ticks(root: Path, *, busy: int, tree: int, steal: int) -> None:
    (root / "stat").write_text(f"cpu  {busy} 0 0 {9 * busy} {busy} 0 0 {steal} 0 0\ncpu0 1 1 1\n")
    for pid in (10, 11, 12):
        own = tree if pid == 12 else 0
        (root / str(pid) / "stat").write_text(f"{pid} (a) b) R 1 1 1 0 -1 4194560 1 2 3 4 {own} 0 0 0 20 0\n")


def test_what_an_engines_own_processes_take_disturbs_nobody(proc: Path) -> None:
    clock = iter((0.0, 10.0, 20.0, 30.0))
    watch = MachineWatch(proc=proc, clock=lambda: next(clock))
    hz = os.sysconf("SC_CLK_TCK")
    start = watch.read(10)
    write_ticks(proc, busy=20 * hz, tree=19 * hz, steal=0)
    alone = watch.read(10)
    assert watch.usage(start, alone) == Usage(10.0, 19.0, pytest.approx(0.1), 0.0)
    assert watch.usage(start, alone).is_quiet
    write_ticks(proc, busy=40 * hz, tree=34 * hz, steal=hz)
    shared = watch.read(10)
    assert watch.usage(alone, shared) == Usage(10.0, 15.0, pytest.approx(0.5), pytest.approx(0.1))
    assert not watch.usage(alone, shared).is_quiet
    write_ticks(proc, busy=60 * hz, tree=54 * hz, steal=4 * hz)
    assert not watch.usage(shared, watch.read(10)).is_quiet, "a stolen core is missing, too"


def test_peak_memory_is_that_of_the_whole_tree(proc: Path) -> None:
    assert MachineWatch(proc=proc).peak_rss_bytes(10) == 1524 * 1024


def test_it_waits_until_the_machine_is_quiet(proc: Path) -> None:
    now, hz = [0.0], os.sysconf("SC_CLK_TCK")
    busy = [0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        busy[0] += int(seconds * hz) if now[0] < 10 else 0
        write_ticks(proc, busy=busy[0], tree=0, steal=0)

    watch = MachineWatch(proc=proc, clock=lambda: now[0], sleep=sleep)
    assert watch.wait_until_quiet(60)
    assert 10 <= now[0] <= 14
    now[0] = 0.0
    assert not watch.wait_until_quiet(5)


def test_the_real_proc_counts_a_childs_work() -> None:
    child = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        watch = MachineWatch()
        before = watch.read(os.getpid())
        end = time.monotonic() + 20
        while watch.read(os.getpid()).tree_s - before.tree_s < 0.1:
            assert time.monotonic() < end
        assert watch.peak_rss_bytes(os.getpid()) > watch.peak_rss_bytes(child.pid) > 1_000_000
    finally:
        child.kill()
        child.communicate()


def test_requirements_without_extras_and_without_those_that_come_otherwise() -> None:
    found = wanted(
        ["torch==2.13.0", 'torchaudio; platform_machine != "s390x"', "numpy>=2", 'ray; extra == "big"', "Torch_Vision"],
        without=("torch", "torchaudio", "torch-vision"),
    )
    assert found == ["numpy>=2"]


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands that would have been run; installing `no-such-engine` fails."""
    ran: list[list[str]] = []

    def run(command: list[str], log: Path, *_: object) -> None:
        ran.append(command)
        if "no-such-engine" in command:
            raise InstallError("pip failed")
        if command[2] == "venv":
            Path(command[3]).mkdir(parents=True)

    monkeypatch.setattr("bench.rivals.venv._run", run)
    return ran


def test_a_venv_is_built_once_and_anew_for_another_recipe(tmp_path: Path, pip: list[list[str]]) -> None:
    folder = tmp_path / "venvs" / "a"
    steps = (PipInstall(arguments=("torch==2.13.0",)), PipInstall(arguments=("--no-deps", "engine==1")))
    python = ready_venv(folder, steps, lambda _: None)
    assert [command[-1] for command in pip] == [str(folder), "torch==2.13.0", "engine==1"], "in this order"
    assert all(command[0] == str(python) for command in pip[1:])
    assert ready_venv(folder, steps, lambda _: None) == python
    assert len(pip) == 3
    (folder / "marker").touch()
    ready_venv(folder, (*steps[:1], PipInstall(arguments=("--no-deps", "engine==2"))), lambda _: None)
    assert len(pip) == 6
    assert not (folder / "marker").exists()


def test_an_installation_that_failed_is_not_taken_for_done(tmp_path: Path, pip: list[list[str]]) -> None:
    for _ in range(2):
        with pytest.raises(InstallError):
            ready_venv(tmp_path / "a", (PipInstall(arguments=("no-such-engine",)),), lambda _: None)
    assert len(pip) == 4


def test_pip_that_fails_is_quoted(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.touch()
    script = "print('ERROR: No matching distribution found for x'); print('[notice] a new pip'); raise SystemExit(1)"
    with pytest.raises(InstallError, match="ERROR: No matching distribution found for x"):
        venv._run([sys.executable, "-c", script], log, "step", {}, lambda _: None)


def test_the_crew_reports_what_cannot_be_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Path:
        raise InstallError("pip failed: no network")

    monkeypatch.setattr("bench.rivals.crew.ready_venv", fail)
    crew = Crew(folder=tmp_path, threads=2, say=lambda _: None)
    assert not crew.install(Rival(name="a", what="", script="", model="x", settings={}, venv="a"))
    assert crew.missing == {"a": "could not be installed: pip failed: no network"}


def test_results_are_whole_after_every_round(entrant: Any, task: Task, tmp_path: Path) -> None:
    materials = Materials(model_name="tiny", models={"safetensors": tmp_path}, missing={}, tasks={"W1": task})
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "vocab_size": 512,
                "max_position_embeddings": 256,
                "rms_norm_eps": 1e-5,
                "torch_dtype": "bfloat16",
            }
        )
    )
    crew = Crew(folder=tmp_path, threads=2, say=lambda _: None, missing={"gone": "could not be installed"})
    session = session_of([entrant(OURS, seconds=0.1), entrant("a", seconds=0.2), entrant("b", fault="load")], task)
    report = Report(session=session, crew=crew, materials=materials, folder=tmp_path / "out")
    pages: list[str] = []

    def save() -> None:
        report.save()
        pages.append(report.results.read_text())

    session.after_round = save
    session.run()
    page = pages[0]
    assert "**gone**: could not be installed" in page
    assert "**b**: did not load: RuntimeError: no such model" in page
    assert "| W1 | a | **" in page
    data = json.loads((tmp_path / "out" / "rivals" / "results.json").read_text())
    assert data["verdicts"][0]["best_rival"] == "a"
    assert data["verdicts"][0]["ratio"] == pytest.approx(2, rel=0.5)
    assert data["out"] == {"gone": "could not be installed", "b": "did not load: RuntimeError: no such model"}
    assert data["bounds"]["W1"]["steps"] == 6
    assert [run["rival"] for run in data["runs"]] == [OURS, "a"]
    assert data["cells"][0]["bound_share"] == pytest.approx(
        data["bounds"]["W1"]["sum_s"] / data["cells"][0]["seconds"], rel=1e-6
    )
    assert "svg" in (tmp_path / "out" / "rivals" / "results.svg").read_text()[:600]
