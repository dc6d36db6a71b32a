"""Nightmill against other engines on this machine: `make bench-rivals`, or

    python -m bench.rivals [--engines nightmill,vllm,openvino,llama.cpp] [--workloads W1,W2,W3] [--rounds 3] [--limit N]

Installs each engine into a virtual environment of its own (at first: some minutes and gigabytes), then runs them in
turn and writes RESULTS.md, rivals/results.json and rivals/results.svg into bench/ or the folder that --out names.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from bench.rivals.crew import Crew
from bench.rivals.lineup import OURS, RIVALS
from bench.rivals.machine_watch import MachineWatch
from bench.rivals.materials import make_materials
from bench.rivals.report import Report
from bench.rivals.session import Limits, Session
from nightmill.config import Settings

WORKLOADS = ("W1", "W2", "W3")
DEFAULT_ENGINES = (OURS, "vllm", "openvino", "llama.cpp")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # engines end with this process
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {text}", file=sys.stderr, flush=True)

    folder = Settings.from_env().cache / "rivals"
    crew = Crew(folder=folder, threads=options.threads, say=say)
    rivals = [RIVALS[name] for name in options.engines if crew.install(RIVALS[name])]
    materials = make_materials(folder, {(rival.model, rival.other_model) for rival in rivals}, say)
    session = Session(
        entrants=[entrant for rival in rivals if (entrant := crew.entrant(rival, materials)) is not None],
        tasks=[materials.tasks[name] for name in options.workloads],
        limits=Limits(rounds=options.rounds, rows=options.limit, minutes=options.minutes, quiet_s=options.patience),
        watch=MachineWatch(),
        say=say,
    )
    report = Report(session=session, crew=crew, materials=materials, folder=options.out)
    session.after_round = report.save
    session.run()
    report.save()
    say(f"written: {report.results}")
    print("\n".join(report.tables()))
    return 0 if session.runs and not any(run.rows_wrong_length for run in session.runs) else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--engines", type=_names(RIVALS), default=DEFAULT_ENGINES, help=f"by comma: {', '.join(RIVALS)}"
    )
    parser.add_argument("--workloads", type=_names(WORKLOADS), default=WORKLOADS, help="by comma: W1, W2, W3")
    parser.add_argument("--rounds", type=int, default=3, help="medians count")
    parser.add_argument("--limit", type=int, help="only the first N rows of each workload: quick, not comparable")
    parser.add_argument(
        "--minutes", type=float, help="begin no round that would end later, counted from the first load"
    )
    parser.add_argument("--patience", type=float, default=60, help="seconds to wait for a quiet machine before a run")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each engine")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1], help="folder for the results")
    return parser.parse_args(arguments)


def _names(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(name.strip() for name in text.split(",") if name.strip())
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown) or 'none given'}; known: {', '.join(known)}")
        return names

    return parse


if __name__ == "__main__":
    sys.exit(main())
