"""The same answers on other machines: one greedy job of real prompts through `nightmill run`, in a process each,

on every instruction set this processor has (torch's own libraries held to it), on one core, and without a compiler.

    python -m bench.equal_results [--rows 256] [--max-tokens 32] [--dtypes bfloat16,float32] [--threads N] [--out DIR]

Each output is compared with the default run's token by token. In bfloat16 a first difference is allowed where
transformers' logits put both tokens within rounding (near tie, counted); in float32 none may differ. The last column
says in how many rows even the log probabilities are the same to the last digit. Exit 1 when a run is not equal.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.dataset as ds
import pyarrow.parquet as pq

from nightmill.records import ModelSpec
from nightmill_kernels.cpu.isa import ISA_VARIABLE, available_isas
from nightmill_worker.bench.comparator import Comparison
from nightmill_worker.model.source import resolve_model

ROOT = Path(__file__).parents[1]
PROMPTS = ROOT / "tests/data/debian_packages_2k.parquet"
SYSTEM_PROMPT = "Summarise this software package in one short sentence."
DTYPES = ("bfloat16", "float32")
DEFAULT = "default"
TIMEOUT_S = 3600
# What would make a run something else than its name says.
_CLEARED = (
    *(ISA_VARIABLE, "CC", "NIGHTMILL_CACHE", "XDG_CACHE_HOME", "DATABASE_URL", "OMP_NUM_THREADS"),
    *("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to run the job."""

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)
    num_cores: int | None = None  # the process sees only so many


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every variant runs."""

    model_dir: Path
    rows: int
    max_tokens: int
    dtype: str
    threads: int | None = None  # of the engine; None: as many as there are cores


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """An output folder, and how it came about."""

    variant: Variant
    folder: Path
    seconds: float
    stderr: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A variant against the default run."""

    completions: Comparison
    differing_columns: tuple[str, ...]
    num_same_bits: int  # rows whose log probabilities are the same to the last digit

    def is_equal(self, dtype: str) -> bool:
        """Up to near ties in bfloat16; wholly in float32."""
        ties = self.completions.near_ties if dtype == "float32" else ()
        return not (self.completions.failures or self.differing_columns or ties)


def variants(scratch: Path) -> list[Variant]:
    """The default first, then every other way this machine can run."""
    weaker = [Variant(name=isa, environment={ISA_VARIABLE: isa}) for isa in available_isas()[1:]]
    # The cache is empty, too: what a compiler made before would do.
    bare = {"CC": "/nonexistent", "XDG_CACHE_HOME": str(scratch / "empty")}
    return [
        Variant(name=DEFAULT),
        Variant(name="one core", num_cores=1),
        *weaker,
        Variant(name="no compiler", environment=bare),
    ]


def run_job(job: Job, variant: Variant, scratch: Path) -> Outcome:
    """`nightmill run` in a process of its own. Raises RuntimeError when it fails."""
    folder = scratch / f"{variant.name.replace(' ', '-')}-{job.dtype}"
    if folder.exists():
        raise RuntimeError(f"{folder} is there already: a finished job is not run again; remove it")
    prompts = scratch / f"prompts-{job.rows}.parquet"
    if not prompts.exists():
        pq.write_table(pq.read_table(PROMPTS, columns=["package", "description"]).slice(0, job.rows), prompts)
    arguments = [
        *("run", str(prompts), "-o", str(folder), "--model", str(job.model_dir), "--dtype", job.dtype, "-q"),
        *("--prompt-column", "description", "--system-prompt", SYSTEM_PROMPT),
        *("--max-tokens", str(job.max_tokens), "--logprobs", "0", "--kv-cache-memory-bytes", "1G"),
        *(() if job.threads is None else ("--num-threads", str(job.threads))),
    ]
    environment = {name: value for name, value in os.environ.items() if name not in _CLEARED}
    # A store of its own: two runs of one job at one output would be one.
    environment |= {"NIGHTMILL_HOME": str(scratch / "home" / folder.name)} | variant.environment
    cores = sorted(os.sched_getaffinity(0))
    started = time.monotonic()
    ended = subprocess.run(
        ["taskset", "-c", ",".join(map(str, cores[: variant.num_cores])), _program(), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    if ended.returncode != 0:
        raise RuntimeError(f"{variant.name}, {job.dtype}: exit {ended.returncode}\n{ended.stderr}")
    return Outcome(variant=variant, folder=folder, seconds=time.monotonic() - started, stderr=ended.stderr)


def judge(reference: Outcome, outcome: Outcome) -> Verdict:
    """Compare an output with the default run's."""
    from nightmill_worker.bench.output_comparison import compare_outputs  # torch: only when there is something to judge

    found = compare_outputs(reference.folder, outcome.folder)
    bits = [_logprobs(o.folder) for o in (reference, outcome)]
    return Verdict(
        completions=found.completions,
        differing_columns=found.differing_columns,
        num_same_bits=sum(a == b for a, b in zip(*bits, strict=True)),
    )


def _logprobs(folder: Path) -> list[str]:
    parts = ds.dataset(sorted(folder.glob("part-*.parquet")), format="parquet")
    lines: list[str] = parts.to_table(columns=["logprobs"])["logprobs"].to_pylist()
    return lines


def _program() -> str:
    return str(Path(sys.executable).with_name("nightmill"))


def compare_all(job: Job, scratch: Path) -> Iterator[tuple[Outcome, Verdict]]:
    """Run everything, and judge each run as soon as it has ended."""
    reference: Outcome | None = None
    for variant in variants(scratch):
        outcome = run_job(job, variant, scratch)
        reference = reference or outcome
        yield outcome, judge(reference, outcome)


def record_of(dtype: str, outcome: Outcome, verdict: Verdict) -> dict[str, object]:
    """For results.json."""
    found = verdict.completions
    return {
        "dtype": dtype,
        "run": outcome.variant.name,
        "rows": found.num_rows,
        "identical": found.num_identical,
        "near_ties": [str(tie) for tie in found.near_ties],
        "failures": [str(failure) for failure in found.failures],
        "differing_columns": list(verdict.differing_columns),
        "same_bits": verdict.num_same_bits,
        "seconds": round(outcome.seconds, 1),
        "is_equal": verdict.is_equal(dtype),
    }


def show(dtype: str, outcome: Outcome, verdict: Verdict) -> None:
    found = verdict.completions
    print(
        f"| {dtype} | {outcome.variant.name} | {found.num_identical} of {found.num_rows} | {len(found.near_ties)} "
        f"| {len(found.failures)} | {verdict.num_same_bits} | {outcome.seconds:.1f} |",
        flush=True,
    )
    if not verdict.is_equal(dtype):
        for line in (*found.failures, *found.near_ties, *verdict.differing_columns):
            print(f"  NOT EQUAL: {line}", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--out", type=Path, default=None, help="keep the outputs and results.json here")
    options = parser.parse_args()
    directory = resolve_model(ModelSpec(model=options.model)).directory
    records: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as temporary:
        scratch = options.out or Path(temporary)
        scratch.mkdir(parents=True, exist_ok=True)
        print("| dtype | run | identical rows | near ties | failures | same bits | seconds |")
        print("|---|---|---|---|---|---|---|")
        for dtype in options.dtypes.split(","):
            sizes = {"rows": options.rows, "max_tokens": options.max_tokens}
            job = Job(model_dir=directory, dtype=dtype, threads=options.threads, **sizes)
            for outcome, verdict in compare_all(job, scratch):
                show(dtype, outcome, verdict)
                records.append(record_of(dtype, outcome, verdict))
        if options.out is not None:
            (options.out / "results.json").write_text(json.dumps(records, indent=1) + "\n")
    return 0 if all(record["is_equal"] for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
