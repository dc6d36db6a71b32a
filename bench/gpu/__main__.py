"""The command: see the package."""

import argparse
import json
import shlex
import sys
import time
from pathlib import Path

from bench.gpu.bound import analytic_steps, analytic_table
from bench.gpu.conductor import TINY_PATIENCE, Conductor
from bench.gpu.facts import gather_facts
from bench.gpu.report import DATA, NOT_MEASURED, RESULTS, Report
from bench.gpu.section import ASSUMED, SECTIONS, chosen

DEADLINE_S = 470.0


def main(arguments: list[str] | None = None) -> int:
    started_at = time.monotonic()
    options = _options(arguments)
    try:
        sections = chosen(options.sections.split(",") if options.sections else None)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "log.txt").unlink(missing_ok=True)
    command = shlex.join(["python3", "-m", "bench.gpu", *(sys.argv[1:] if arguments is None else arguments)])
    report = Report(
        facts=gather_facts(options.commit, command),
        bounds=analytic_table(ASSUMED),
        steps=analytic_steps(ASSUMED),
        is_tiny=options.tiny,
        folder=options.out,
    )
    if not report.facts.has_device and not options.tiny:
        return _without_device(report)
    conductor = Conductor(
        folder=options.out,
        is_tiny=options.tiny,
        deadline_s=options.deadline or DEADLINE_S * (TINY_PATIENCE if options.tiny else 1),
        report=report.save,
        without=options.without.split(",") if options.without else (),
        started_at=started_at,
    )
    outcomes = conductor.run(sections)
    print("\n".join(report.last_table(outcomes)), flush=True)
    return 0 if all(outcome.has_passed for outcome in outcomes) else 1


def _without_device(report: Report) -> int:
    kept = _is_measured(report.folder / DATA)
    if not kept:
        report.save([])
    print(
        f"{NOT_MEASURED}: torch finds no GPU here. "
        + (f"{report.folder / RESULTS} stays as it was measured." if kept else f"See {report.folder / RESULTS}.")
        + " Run this on a machine with one; --tiny tries the script on a CPU.",
        file=sys.stderr,
    )
    return 1


def _is_measured(path: Path) -> bool:
    try:
        return bool(json.loads(path.read_text())["measured"])
    except (OSError, ValueError, KeyError, TypeError):  # none there, or cut short
        return False


def _options(arguments: list[str] | None) -> argparse.Namespace:
    names = ", ".join(section.name for section in SECTIONS)
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description="Prove and measure Nightmill on a GPU.")
    parser.add_argument("--out", type=Path, required=True, help="a folder for results.json, RESULTS.md and logs")
    parser.add_argument("--sections", help=f"with commas, of {names}; default: all")
    parser.add_argument("--deadline", type=float, help=f"seconds in all; default: {DEADLINE_S:.0f}")
    parser.add_argument("--commit", help="of this checkout, where git cannot tell")
    parser.add_argument("--without", help="with commas, of graphs, run-ahead: off in every run")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on a CPU: does the script still work?")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
