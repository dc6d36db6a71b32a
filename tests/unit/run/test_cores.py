"""Which processors the engine and the feeder use."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nightmill_worker.cores import CorePlan, Cores, claim_cores, find_cores, plan_cores

EIGHT = Cores(cpus=tuple(range(8)), cores=tuple(range(8)), quota=None)


@pytest.fixture
def allow(monkeypatch):
    """Set this process's affinity mask, as far as Python sees it."""

    def set_mask(*cpus: int) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cpus), raising=False)

    return set_mask


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def siblings(root: Path, *pairs: tuple[int, ...]) -> None:
    for pair in pairs:
        for cpu in pair:
            path = f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
            write(root, path, ",".join(map(str, pair)) + "\n")


def test_hyperthreads_of_a_core_count_once(tmp_path, allow):
    siblings(tmp_path, (0, 4), (1, 5), (2, 6), (3, 7))
    allow(0, 1, 4, 5, 7)
    assert find_cores(tmp_path) == Cores(cpus=(0, 1, 4, 5, 7), cores=(0, 1, 7), quota=None)


def test_a_machine_that_tells_nothing_has_a_core_for_each_processor(tmp_path, allow):
    allow(0, 1, 2)
    assert find_cores(tmp_path) == Cores(cpus=(0, 1, 2), cores=(0, 1, 2), quota=None)


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"sys/fs/cgroup/a/b/cpu.max": "max 100000\n", "sys/fs/cgroup/a/cpu.max": "250000 100000\n"}, 2.5),
        ({"sys/fs/cgroup/a/b/cpu.max": "50000 100000\n", "sys/fs/cgroup/a/cpu.max": "250000 100000\n"}, 0.5),
        ({"sys/fs/cgroup/a/b/cpu.max": "250000 100000\n", "sys/fs/cgroup/a/cpu.max": "150000 100000\n"}, 1.5),
        ({"sys/fs/cgroup/cpu.max": "300000 100000\n"}, 3.0),  # a container: the group's own path is not there
        ({"sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, None),
        ({}, None),
    ],
)
def test_the_tightest_quota_of_the_control_groups_counts(tmp_path, allow, files, quota):
    allow(0, 1)
    write(tmp_path, "proc/self/cgroup", "0::/a/b\n")
    for path, text in files.items():
        write(tmp_path, path, text)
    assert find_cores(tmp_path).quota == quota


@pytest.mark.parametrize(("microseconds", "quota"), [("150000", 1.5), ("-1", None)])
def test_control_groups_of_the_older_kind(tmp_path, allow, microseconds, quota):
    allow(0, 1)
    write(tmp_path, "proc/self/cgroup", "9:name=systemd:/\n3:cpuset:/x\n2:cpu,cpuacct:/pod/c\n0::/\n")
    write(tmp_path, "sys/fs/cgroup/cpu/pod/c/cpu.cfs_quota_us", microseconds)
    write(tmp_path, "sys/fs/cgroup/cpu/pod/c/cpu.cfs_period_us", "100000\n")
    assert find_cores(tmp_path).quota == quota


@pytest.mark.parametrize(
    ("quota", "num_threads", "omp", "threads", "reason"),
    [
        (None, None, "", 8, ""),
        (2.5, None, "", 3, "the control group's CPU quota"),  # two threads would leave half a core of it unused
        (0.2, None, "", 1, "the control group's CPU quota"),
        (64.0, None, "", 8, ""),
        (2.5, None, "4", 4, "OMP_NUM_THREADS"),
        (None, None, "4,2", 4, "OMP_NUM_THREADS"),
        (None, None, "many", 8, ""),
        (None, 2, "4", 2, "--num-threads"),
        (None, 12, "", 12, "--num-threads"),
    ],
)
def test_who_decides_the_engines_threads(quota, num_threads, omp, threads, reason):
    cores = Cores(cpus=EIGHT.cpus, cores=EIGHT.cores, quota=quota)
    plan = plan_cores(cores, num_threads=num_threads, environ={"OMP_NUM_THREADS": omp} if omp else {})
    assert (plan.engine_threads, plan.reason) == (threads, reason)


@pytest.mark.parametrize(("count", "on_gpu", "threads"), [(1, False, 1), (2, False, 1), (64, False, 8), (64, True, 63)])
def test_the_feeders_threads_leave_the_engine_its_cores(count, on_gpu, threads):
    cores = Cores(cpus=tuple(range(count)), cores=tuple(range(count)), quota=None)
    assert plan_cores(cores, on_gpu=on_gpu, environ={}).feeder_threads == threads


def test_the_line_at_the_start():
    plan = CorePlan(engine_threads=3, feeder_threads=1, num_cores=8, reason="--num-threads")
    assert str(plan) == "engine: 3 threads on 8 cores (--num-threads); feeder: 1 thread beside it"
    pinned = CorePlan(engine_threads=2, feeder_threads=1, num_cores=2, pinned=(0, 1))
    assert str(pinned) == "engine: 2 threads on 2 cores, each on its own; feeder: 1 thread beside it"


# Processors that no machine has: nobody else claims them.
_FAR = (100_000, 100_001, 100_002)


def far(count: int) -> Cores:
    return Cores(cpus=_FAR[:count], cores=_FAR[:count], quota=None)


_CLAIM = """
import sys
from nightmill_worker.cores import Cores, claim_cores, plan_cores
cpus = tuple(map(int, sys.argv[1:]))
cores = Cores(cpus=cpus, cores=cpus, quota=None)
print(claim_cores(plan_cores(cores, environ={}), cores, environ={}).pinned, flush=True)
sys.stdin.read()
"""


class Claimant:
    """Another process that wants these cores for its engine; it holds them until `end`."""

    def __init__(self, *cpus: int) -> None:
        command = [sys.executable, "-c", _CLAIM, *map(str, cpus)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.pinned = self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.communicate()


def test_an_engine_is_not_pinned_where_another_one_is():
    first = Claimant(*_FAR[:2])
    second = Claimant(*_FAR[1:])
    assert (first.pinned, second.pinned) == (str(_FAR[:2]), "()")
    first.end()
    third = Claimant(*_FAR[1:])  # the second one kept nothing of what it could not have whole
    assert third.pinned == str(_FAR[1:])
    second.end()
    third.end()


def test_a_process_has_what_it_has_claimed():
    plan = plan_cores(far(2), environ={})
    assert claim_cores(plan, far(2), environ={}).pinned == _FAR[:2]
    assert claim_cores(plan, far(2), environ={}).pinned == _FAR[:2]  # its next model


@pytest.mark.parametrize(
    ("count", "num_threads", "environ"),
    [
        (2, 1, {}),  # two such engines could meet on one core
        (2, 4, {}),
        (1, None, {}),
        (2, None, {"OMP_PROC_BIND": "false"}),
        (2, None, {"GOMP_CPU_AFFINITY": "0-1"}),
    ],
)
def test_threads_go_where_they_like_unless_they_are_one_for_every_core(count, num_threads, environ):
    plan = plan_cores(far(count), num_threads=num_threads, environ=environ)
    assert claim_cores(plan, far(count), environ=environ) == plan


_PINNED = """
import os
from pathlib import Path
from nightmill.errors import NightmillError
from nightmill.records import EngineOptions, ModelSpec
from nightmill_worker.cores import CorePlan, find_cores
from nightmill_worker.model_recipe import ModelRecipe
cores = find_cores().cores
plan = CorePlan(engine_threads=len(cores), feeder_threads=1, num_cores=len(cores), pinned=cores)
spec = ModelSpec(model="nowhere")
try:
    ModelRecipe(directory=Path("nowhere"), spec=spec, options=EngineOptions(), cores=plan).build()
except NightmillError:
    pass
import torch
torch.randn(1000, 1000) @ torch.randn(1000, 1000)
masks = [os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")]
# A pool of torch's that nobody uses begins on the first core, too.
print(all({cpu} in masks for cpu in cores), os.sched_getaffinity(0) == {cores[0]})
"""


@pytest.mark.skipif(len(find_cores().cores) < 2, reason="one core has nothing to choose from")
def test_each_thread_of_the_engine_stays_on_its_core():
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    output = subprocess.run([sys.executable, "-c", _PINNED], env=environ, capture_output=True, text=True, check=True)
    assert output.stdout.split() == ["True", "True"]


# In a process of its own: pools get their size once. Every thread of tokenizers' pool is counted, not only busy ones.
_FEEDER = """
import os, pyarrow
from tokenizers import Tokenizer, models
from nightmill_worker.cores import CorePlan, limit_feeder
limit_feeder(CorePlan(engine_threads=2, feeder_threads=3, num_cores=2))
before = len(os.listdir("/proc/self/task"))
Tokenizer(models.BPE()).encode_batch(["a b c"] * 1000)
print(len(os.listdir("/proc/self/task")) - before, pyarrow.cpu_count())
"""


def test_the_feeders_libraries_start_no_more_threads_than_planned():
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("RAYON", "TOKENIZERS"))}
    output = subprocess.run([sys.executable, "-c", _FEEDER], env=environ, capture_output=True, text=True, check=True)
    assert output.stdout.split() == ["3", "3"]


_ENGINE = """
import os
from pathlib import Path
from nightmill.errors import NightmillError
from nightmill.records import EngineOptions, ModelSpec
from nightmill_worker.model_recipe import ModelRecipe
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
try:
    ModelRecipe(directory=Path("nowhere"), spec=ModelSpec(model="nowhere"), options=EngineOptions()).build()
except NightmillError:
    pass
import torch
one = torch.get_num_threads()
try:
    options = EngineOptions(num_threads=3)
    ModelRecipe(directory=Path("nowhere"), spec=ModelSpec(model="nowhere"), options=options).build()
except NightmillError:
    pass
print(one, torch.get_num_threads())
"""


def test_the_engine_computes_on_as_many_threads_as_planned():
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    output = subprocess.run([sys.executable, "-c", _ENGINE], env=environ, capture_output=True, text=True, check=True)
    assert output.stdout.split() == ["1", "3"]


_BOUND = """
import os
from pathlib import Path
from nightmill.errors import NightmillError
from nightmill.records import EngineOptions, ModelSpec
from nightmill_worker.model_recipe import ModelRecipe
usable = len(os.sched_getaffinity(0))
try:
    ModelRecipe(directory=Path("nowhere"), spec=ModelSpec(model="nowhere"), options=EngineOptions()).build()
except NightmillError:
    pass
import torch
print(usable, len(os.sched_getaffinity(0)), torch.get_num_threads())
"""


@pytest.mark.skipif(len(find_cores().cores) < 2, reason="with one core there is nothing to lose")
def test_threads_that_the_user_pins_are_as_many(tmp_path):
    """Loading torch then binds the main thread to one core: the plan must not come after that."""
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environ |= {"OMP_PROC_BIND": "close", "OMP_PLACES": "cores"}
    output = subprocess.run([sys.executable, "-c", _BOUND], env=environ, capture_output=True, text=True, check=True)
    usable, left, threads = map(int, output.stdout.split())
    assert (left, threads) == (1, len(find_cores().cores))
    assert usable >= threads
