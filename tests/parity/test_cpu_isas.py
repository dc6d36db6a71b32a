"""One greedy job through `nightmill run` as other machines would run it: the answers are the default run's.

A few rows in every run of the suite; 256 and everything this processor has in the long one. `python -m
bench.equal_results` prints the table.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from bench.equal_results import DEFAULT, DTYPES, Job, Outcome, compare_all, judge, run_job, variants

from nightmill_kernels.cpu.isa import available_isas

pytestmark = pytest.mark.demo_model

ROWS, MAX_TOKENS = 10, 10
LONG_ROWS, LONG_MAX_TOKENS = 256, 32
CHECKED = [("bfloat16", name) for name in ("one core", "avx2", "portable", "no compiler")]
CHECKED += [("float32", "avx2")]  # the long test: all of them
OTHER_ARITHMETIC = ("avx2", "portable", "no compiler")

RunOf = Callable[[str, str], Outcome]


@pytest.fixture(scope="module")
def run_of(demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> RunOf:
    """`run_of(dtype, name)`: the run of that variant. All are started at once, two at a time."""
    scratch = tmp_path_factory.mktemp("isas")
    known = {variant.name: variant for variant in variants(scratch)}
    wanted = [("bfloat16", DEFAULT), ("float32", DEFAULT), *(pair for pair in CHECKED if pair[1] in known)]
    started: dict[tuple[str, str], Future[Outcome]] = {}
    with ThreadPoolExecutor(2) as pool:
        for dtype, name in wanted:
            job = Job(model_dir=demo_model_dir, rows=ROWS, max_tokens=MAX_TOKENS, dtype=dtype)
            started[dtype, name] = pool.submit(run_job, job, known[name], scratch)
    return lambda dtype, name: started[dtype, name].result()


@pytest.mark.parametrize(("dtype", "name"), CHECKED)
def test_answers_are_those_of_the_default_run(
    run_of: RunOf, dtype: str, name: str, record_property: Callable[[str, object], None]
) -> None:
    if name == "avx2" and name not in available_isas()[1:]:
        pytest.skip("the default run is no better than AVX2 here")
    verdict = judge(run_of(dtype, DEFAULT), run_of(dtype, name))
    record_property("near_ties", len(verdict.completions.near_ties))
    assert verdict.is_equal(dtype), str(verdict.completions)
    # Correct engines agree on most short answers: many near ties would mean a loss of precision.
    assert verdict.completions.num_identical > ROWS // 2, str(verdict.completions)
    if name in OTHER_ARITHMETIC:
        assert verdict.num_same_bits < ROWS, "the default's arithmetic: this run was not what its name says"


def test_without_a_compiler_one_line_says_so(run_of: RunOf) -> None:
    (line,) = run_of("bfloat16", "no compiler").stderr.splitlines()
    assert "no C compiler (/nonexistent)" in line
    assert "several times slower" in line
    assert run_of("bfloat16", DEFAULT).stderr == ""


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_of_this_machines_ways_give_equal_answers(
    demo_model_dir: Path, tmp_path: Path, dtype: str, record_property: Callable[[str, object], None]
) -> None:
    job = Job(model_dir=demo_model_dir, rows=LONG_ROWS, max_tokens=LONG_MAX_TOKENS, dtype=dtype)
    for outcome, verdict in compare_all(job, tmp_path):
        record_property(f"near_ties {outcome.variant.name}", len(verdict.completions.near_ties))
        assert verdict.is_equal(dtype), f"{outcome.variant.name}: {verdict.completions}"
        assert verdict.completions.num_identical > LONG_ROWS // 2, f"{outcome.variant.name}: {verdict.completions}"
