"""The command: see the package."""

import argparse
import os
import sys
from collections.abc import Sequence

os.environ.pop("TRITON_INTERPRET", None)  # read when triton is imported

from rich.console import Console
from rich.table import Table

from bench.gpu.rehearsal.play import WAYS
from bench.gpu.rehearsal.shapes import SHAPES
from bench.gpu.rehearsal.verdict import Rehearsed, rehearse

DTYPES = ("bfloat16", "float16", "float32")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0: nothing to object to; 1: findings."""
    options = _parser().parse_args(arguments)
    talk = Console(stderr=True)
    results = []
    for model in options.model:
        for dtype in options.dtype:
            talk.print(f"rehearsing {model} in {dtype}", highlight=False)
            results.append(rehearse(model, dtype, options.arch, [way for way in WAYS if way.name in options.way]))
    Console(width=None if sys.stdout.isatty() else 160).print(_table(results))
    for result in results:
        for build in result.unchecked:
            talk.print(f"  not in kernels-check: {build.stem} {build.config}", markup=False, highlight=False)
        for finding in result.findings:
            talk.print(f"✗ {result.model} {result.dtype}: {finding}", markup=False, highlight=False, soft_wrap=True)
    count = sum(len(result.findings) for result in results)
    talk.print(f"{len(results)} models, {sum(r.num_builds for r in results)} builds, {count} findings", highlight=False)
    return 1 if count else 0


def _table(results: Sequence[Rehearsed]) -> Table:
    table = Table(title="rehearsal: steps, copies of a step at most to and from the device, launches of a decode step")
    for name in (
        "model",
        "dtype",
        "way",
        "steps",
        "undrawn",
        "shared rows",
        "preempted",
        "copies",
        "graph",
        "beside it",
    ):
        table.add_column(name, justify="left" if name in ("model", "dtype", "way") else "right")
    for result in results:
        for way, played in result.played.items():
            beside = sorted(played.launches_beside_graph)
            table.add_row(
                *(result.model, result.dtype, way),
                *(str(played.steps), str(played.undrawn_steps), str(played.shared_rows), str(played.preemptions)),
                f"{played.most_to_device} + {played.most_to_host}",
                str(played.graph_launches or "-"),
                f"{beside[0]}-{beside[-1]}" if beside else "-",
            )
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.rehearsal", description=__doc__)
    parser.add_argument("--model", nargs="+", choices=SHAPES, default=list(SHAPES), help="shapes  [all]")
    names = [way.name for way in WAYS]
    parser.add_argument("--way", nargs="+", choices=names, default=names, help="how to run them  [all]")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bfloat16"], help="[bfloat16]")
    parser.add_argument("--arch", type=int, default=90, help="compute capability to compile for  [90]")
    return parser


if __name__ == "__main__":
    sys.exit(main())
