"""What an ETL image has: `pip install nightmill`, without torch, without the worker's packages."""

import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from nightmill.cli.main import cli

ROOT = Path(__file__).parents[2]


def base_modules() -> set[str]:
    """Top-level modules of what `pip install nightmill` brings: its requirements, and theirs."""
    wanted, seen = ["nightmill"], set()
    while wanted:
        name = canonicalize_name(wanted.pop())
        if name in seen:
            continue
        try:
            requirements = [Requirement(text) for text in metadata.requires(name) or []]
        except metadata.PackageNotFoundError:  # for another platform
            continue
        seen.add(name)
        extras = ["", "binary"] if name == "psycopg" else [""]
        wanted += [r.name for r in requirements if not r.marker or any(r.marker.evaluate({"extra": e}) for e in extras)]
    owners = metadata.packages_distributions()
    return {module for module, names in owners.items() if seen & {canonicalize_name(n) for n in names}}


# Only what `pip install nightmill` brings can be imported; everything else is as if it were not there.
GUARD = """
import importlib.abc, sys, sysconfig
ALLOWED = {base!r} | set(sys.stdlib_module_names)

class Guard(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if not (top in ALLOWED or top.startswith("_sysconfigdata")) or top in {worker!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        return None

sys.meta_path.insert(0, Guard())
sys.argv = ["nightmill", *sys.argv[1:]]
"""
COMMAND = "from nightmill.cli.main import main\nmain()\n"
COMMANDS = """
import json
from nightmill.cli.main import cli
codes = []
for words in json.loads(sys.argv[1]):
    try:
        cli(words, prog_name="nightmill")
    except SystemExit as ended:
        codes.append(ended.code)
print(codes, file=sys.stderr)
"""
CLIENT = """
import pathlib, sys
from nightmill import Client
source, output = sys.argv[1:]
with Client() as client:
    job = client.submit(source, output, "org/name", max_tokens=3)
    assert job.status == "queued"
    assert job.cancel().status == "cancelling"
    print(job.id)
"""
BASE = base_modules()
PREFACE = GUARD.format(base=BASE, worker=set())
WITHOUT_WORKER = GUARD.format(base=BASE, worker={"nightmill_worker", "nightmill_kernels"})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": ["a", None, "c"], "custom_id": ["x", "y", "z"]}), path)
    return path


def python(code: str, tmp_path: Path, *arguments: Any) -> subprocess.CompletedProcess[str]:
    environment = {"NIGHTMILL_HOME": str(tmp_path / "home"), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_every_command_of_the_control_plane_works_with_the_base_packages_alone(tmp_path: Path, source: Path) -> None:
    output = tmp_path / "out"
    submit = ("submit", source, "-o", output, "--model", "org/name", "--max-tokens", "3")
    commands = {
        ("validate", source): 0,
        submit: 0,
        (*submit, "--json"): 0,
        ("status", output, "--json"): 0,
        ("list",): 0,
        ("wait", output, "--timeout", "0.1s"): 124,
        ("cancel", output, "--wait"): 0,
        ("wait", output): 6,
        ("watch", output): 6,
        ("results", output): 0,
        ("results", output, "--limit", "2"): 0,
        ("results", output, "--openai", tmp_path / "a.jsonl", "--openai-errors", tmp_path / "b.jsonl"): 0,
        ("errors", output): 0,
        ("retry", output): 0,
        ("--help",): 0,
    }
    words = [[str(word) for word in command] for command in commands]
    ended = python(WITHOUT_WORKER + COMMANDS, tmp_path, json.dumps(words))
    assert ended.stderr.splitlines()[-1] == str(list(commands.values())), ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_client_works_with_the_base_packages_alone(tmp_path: Path, source: Path) -> None:
    ended = python(WITHOUT_WORKER + CLIENT, tmp_path, source, tmp_path / "out")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("job-")


@pytest.mark.parametrize("command", ["run", "worker", "bench"])
def test_what_needs_the_worker_says_what_to_install(tmp_path: Path, source: Path, command: str) -> None:
    arguments = {"run": (source, "-o", tmp_path / "out", "--model", "demo"), "bench": ("--workload", "W1")}
    for preface in (PREFACE, WITHOUT_WORKER):
        ended = python(preface + COMMAND, tmp_path, command, *arguments.get(command, ()))
        assert ended.returncode == 1, ended.stderr
        assert "pip install 'nightmill[worker]'" in ended.stderr
        assert "bug" not in ended.stderr


LIGHT = """
import sys
from nightmill.cli.main import cli
try:
    cli({arguments!r}, prog_name="nightmill")
except SystemExit as ended:
    code = ended.code
names = {{"torch", "transformers", "tokenizers", "pyarrow", "numpy", "boto3", "alembic", "kombu", "psycopg", "rich"}}
heavy = (names | {{"celery", "pandas", "nightmill_worker", "nightmill_kernels"}}) & set(sys.modules)
sys.exit(f"imported {{sorted(heavy)}}" if heavy else code)
"""


@pytest.fixture(scope="module")
def cancelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with one job, which has ended."""
    path = tmp_path_factory.mktemp("cancelled")
    pq.write_table(pa.table({"prompt": ["a"]}), path / "in.parquet")
    environ = {"NIGHTMILL_HOME": str(path / "home"), "HOME": str(path)}
    submit = ["submit", str(path / "in.parquet"), "-o", str(path / "out"), "--model", "m"]
    for words in (submit, ["cancel", str(path / "out")]):
        assert CliRunner().invoke(cli, words, env=environ).exit_code == 0
    return path


@pytest.mark.parametrize("arguments", [["status"], ["list"], ["wait", "--quiet"], ["status", "--json"]])
def test_what_only_looks_imports_nothing_heavy(cancelled: Path, arguments: list[str]) -> None:
    """`nightmill status` answers in under half a second because of this; seconds themselves depend on the machine."""
    ended = python(LIGHT.format(arguments=arguments), cancelled)
    assert ended.returncode == (6 if "wait" in arguments else 0), ended.stderr
    assert "imported" not in ended.stderr


def test_importing_the_package_imports_nothing_but_itself(tmp_path: Path) -> None:
    code = "import sys; before = set(sys.modules); import nightmill; print(*(set(sys.modules) - before))"
    found = python(code, tmp_path).stdout.split()
    assert [name for name in found if name.partition(".")[0] not in sys.stdlib_module_names] == ["nightmill"]


def test_the_guard_lets_pass_what_is_installed_and_nothing_else() -> None:
    assert {"nightmill", "pyarrow", "sqlalchemy", "botocore", "psycopg", "psycopg_binary", "amqp"} <= BASE
    assert not {"torch", "tokenizers", "celery", "jinja2", "pandas", "pytest", "psutil"} & BASE


def test_the_base_packages_are_few() -> None:
    """Each new one is an image that grows in every pipeline: think twice, then add it here."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split(r"[\[<>=~! ]", requirement)[0] for requirement in declared}
    assert names == {"alembic", "boto3", "click", "kombu", "numpy", "psycopg", "pyarrow", "rich", "sqlalchemy"}
