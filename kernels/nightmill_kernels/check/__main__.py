"""`python -m nightmill_kernels.check`: compile the kernels for GPUs that are not here, and judge them."""

import argparse
import json
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from nightmill_kernels.check.budget import Budget
from nightmill_kernels.check.build import KernelBuild
from nightmill_kernels.check.farm import Farm, WorkerError
from nightmill_kernels.check.rules import check_builds, check_catalogue, gone_lines, unknown_versions
from nightmill_kernels.check.table import build_table
from nightmill_kernels.check.versions import INSTALLED, VersionError, triton_dir
from nightmill_kernels.gpu.device_limits import SHARED_LIMITS

_BUDGET = Path("bench/kernels/budget.json")
_ARCHS = tuple(SHARED_LIMITS)
_WIDTH = 200  # of the table in a log


@dataclass(frozen=True, slots=True)
class Result:
    """Of all versions of triton."""

    builds: list[KernelBuild]
    findings: list[str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0: nothing to object to; 1: findings; 2: it could not be checked."""
    options = _parser().parse_args(arguments)
    talk = Console(stderr=True)
    try:
        result = _build(options, talk)
    except (WorkerError, VersionError) as error:
        talk.print(f"kernels-check: {error}", markup=False, highlight=False)
        return 2
    Console(width=None if sys.stdout.isatty() else _WIDTH).print(build_table(result.builds))
    if options.json is not None:
        options.json.write_text(json.dumps([build.as_row() for build in result.builds], indent=1) + "\n")
    return _judge(options, result, talk)


def _judge(options: argparse.Namespace, result: Result, talk: Console) -> int:
    budget = Budget.read(options.budget)
    if options.update:
        budget = budget.updated(result.builds, is_all=not options.module)
        budget.write(options.budget)
        talk.print(f"wrote {options.budget}", markup=False)
    findings = [*result.findings, *check_builds(result.builds, budget)]
    if not options.module:
        findings += gone_lines(result.builds, budget)
    for finding in findings:
        talk.print(f"✗ {finding}", markup=False, highlight=False, soft_wrap=True)
    for version in unknown_versions(result.builds, budget):
        talk.print(
            f"triton {version} has no line in {options.budget}: registers and shared memory were not compared; "
            "`make kernels-check UPDATE=1` writes them",
            markup=False,
            soft_wrap=True,
        )
    talk.print(f"{len(result.builds)} builds, {len(findings)} findings", highlight=False)
    return 1 if findings else 0


def _build(options: argparse.Namespace, talk: Console) -> Result:
    builds: list[KernelBuild] = []
    findings: list[str] = []
    lock = threading.Lock()
    for version in options.triton:
        talk.print(f"triton {version}: starting {options.jobs} compilers", highlight=False)
        with Farm(options.module, triton_dir(version), options.jobs) as farm:
            findings += check_catalogue(farm.catalogue)
            wanted = [(key, arch) for key in farm.catalogue.specs for arch in options.arch if key.runs_on(arch)]
            with Progress(console=talk, transient=True) as progress:
                task = progress.add_task(f"triton {farm.catalogue.triton}", total=len(wanted))

                def count(build: KernelBuild, bar: Progress = progress, task: int = task) -> None:
                    with lock:
                        bar.update(task, advance=1, description=f"{build.stem} sm_{build.arch}")  # type: ignore[arg-type]

                builds += farm.build(wanted, count)
    return Result(builds, list(dict.fromkeys(findings)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m nightmill_kernels.check", description=__doc__)
    parser.add_argument(
        "--arch", type=int, nargs="+", default=_ARCHS, help=f"compute capabilities  [{' '.join(map(str, _ARCHS))}]"
    )
    parser.add_argument(
        "--triton", nargs="+", default=[INSTALLED], help="versions; others than the installed one are fetched by pip"
    )
    parser.add_argument("--module", nargs="+", default=[], help="modules of kernels  [all of nightmill_kernels.gpu]")
    parser.add_argument("--budget", type=Path, default=_BUDGET, help=f"what is allowed  [{_BUDGET}]")
    parser.add_argument("--update", action="store_true", help="write what was found as the budget")
    parser.add_argument("--json", type=Path, help="write the rows of the table to a file")
    parser.add_argument("--jobs", type=int, default=2, help="compiling processes  [2]")
    return parser


if __name__ == "__main__":
    sys.exit(main())
