import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import nightmill
from nightmill.errors import ConfigError
from nightmill.failpoint import FAILPOINTS, failpoint, parse_failpoints

RUN = """
from nightmill.failpoint import failpoint
for i in range(4):
    print(i, flush=True)
    failpoint("after_part_put")
    failpoint("after_claim")
"""


def run(spec: str) -> tuple[int, str, str]:
    environ = {"NIGHTMILL_FAILPOINT": spec, "PYTHONPATH": str(Path(nightmill.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", RUN], env=environ, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("spec", "last"), [("after_part_put", 0), ("after_part_put:3", 2), ("before_commit,after_claim:2", 1)]
)
def test_the_process_is_killed_at_that_hit(spec: str, last: int) -> None:
    code, output, _ = run(spec)
    assert code == -signal.SIGKILL
    assert output.split()[-1] == str(last)


@pytest.mark.parametrize("spec", ["", "after_part_put:5", "in_finalize"])
def test_the_process_lives_when_the_hit_does_not_come(spec: str) -> None:
    assert run(spec)[0] == 0


def test_a_typo_in_the_environment_is_an_error_at_the_first_point() -> None:
    code, _, errors = run("after_part_putt")
    assert code == 1
    assert "after_part_putt" in errors


def test_unset_does_nothing() -> None:
    failpoint("after_claim")


@pytest.mark.parametrize("spec", ["nonsense", "after_claim:0", "after_claim:-1", "after_claim:x", "after_claim:1:2"])
def test_bad_values_name_the_variable(spec: str) -> None:
    with pytest.raises(ConfigError, match="NIGHTMILL_FAILPOINT"):
        parse_failpoints(spec)


def test_spaces_and_empty_items_are_let_pass() -> None:
    assert parse_failpoints(" after_claim:2, after_commit ,,") == {"after_claim": 2, "after_commit": 1}


def test_the_code_names_only_registered_points() -> None:
    root = Path(nightmill.__file__).parents[2]
    named = {
        name
        for path in [*root.glob("jobs/**/*.py"), *root.glob("worker/**/*.py")]
        for name in re.findall(r'failpoint\("(\w+)"\)', path.read_text())
    }
    assert named <= FAILPOINTS
