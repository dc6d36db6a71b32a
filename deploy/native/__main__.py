"""`python -m deploy.native up|down|status`: what `make up` and `make down` run."""

import argparse
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from deploy.native.failure import ServiceError, log_tail
from deploy.native.folder import remove
from deploy.native.record import ProcessRecord, stop_all
from deploy.native.stack import Stack, StackOptions
from deploy.native.state import State


def main(words: Sequence[str]) -> int:
    """Exit code 0: done; 1: failed, with the reason on stderr."""
    arguments = _parser().parse_args(words)
    state = State(arguments.folder)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with state.lock():
            if arguments.command == "up":
                _up(state, _options(arguments))
            else:
                _down(state, clean=arguments.clean)
    except ServiceError as error:
        _say(str(error))
        return 1
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deploy.native", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(".nightmill"), help="state and data [default: .nightmill]")
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start everything; returns when all is ready")
    up.add_argument("--workers", type=int, default=2, metavar="N")
    up.add_argument("--model", default="demo", help="fetched before the workers start; '' for none")
    up.add_argument("--s3", choices=("auto", "ceph", "moto"), default="auto", help="auto: Ceph where it is installed")
    up.add_argument("--fake-engine", metavar="SCRIPT", help="workers without a model, for tests")
    up.add_argument("--worker-flags", type=shlex.split, default=[], metavar="WORDS", help="for `nightmill worker`")
    down = commands.add_parser("down", help="stop exactly what `up` started, the workers first")
    down.add_argument("--clean", action="store_true", help="remove the data, too")
    return parser


def _options(arguments: argparse.Namespace) -> StackOptions:
    return StackOptions(
        workers=arguments.workers,
        model=arguments.model,
        s3=arguments.s3,
        fake_engine=arguments.fake_engine,
        worker_flags=tuple(arguments.worker_flags),
    )


def _up(state: State, options: StackOptions) -> None:
    records = state.read()
    if records:
        _refuse_what_is_half_up(records)
        _say(f"already up ({len(records)} processes); the variables are in {state.env_file}")
        return
    began = time.monotonic()
    try:
        Stack(state, options, _say).start()
    except BaseException:
        _say("stopping what was started")
        _stop(state)
        raise
    _say(f"up in {time.monotonic() - began:.0f} s. Next:  set -a; . {_short(state.env_file)}; set +a")
    submit = 'nightmill submit "s3://$NIGHTMILL_BUCKET/prompts/" -o "s3://$NIGHTMILL_BUCKET/answers/"'
    _say(f"then:  {submit} --model demo --wait     (some prompts are there)")


def _refuse_what_is_half_up(records: list[ProcessRecord]) -> None:
    dead = [record for record in records if not record.alive]
    if dead:
        tails = "\n".join(f"{record.name} has ended; {log_tail(Path(record.log), lines=10)}" for record in dead)
        raise ServiceError(tails, hint="run `make down`, then `make up` again")


def _down(state: State, *, clean: bool) -> None:
    if not state.read():
        _say("nothing is up")
    _stop(state)
    if clean:
        remove(state.data)
        remove(state.folder / "home")
        _say(f"removed the data in {state.data}")


def _stop(state: State) -> None:
    """Workers together, so that they give back their shards while database and broker are there; then the services."""
    records = state.read()
    state.remove_env()
    workers = [record for record in records if record.name.startswith("worker-")]
    rest = [record for record in reversed(records) if record not in workers]
    if any(worker.alive for worker in workers):
        _say(f"stopping {len(workers)} workers: what runs may finish, up to {max(w.grace_s for w in workers):.0f} s")
    killed = stop_all(workers)
    for record in rest:
        if record.alive:
            _say(f"stopping {record.name}")
        killed += stop_all([record])
    state.write([])
    for record in killed:
        _say(f"{record.name} did not stop in time and was killed; its log: {record.log}")
    if records:
        _say("down")


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _say(line: str) -> None:
    sys.stderr.write(f"nightmill: {line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
