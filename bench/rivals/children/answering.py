"""What every child process of the comparison does: load one engine once, then answer workloads on command.

Runs in the engine's own virtual environment, so it imports the standard library only. The driver writes one JSON object
a line to stdin and reads one a line from what was stdout; whatever the engine itself prints goes to stderr.

    {"do": "prepare", "rows": FILE, "limit": N|null} -> {"kind": "prepared"}
    {"do": "run"}     -> {"kind": "answer", "seconds": S, "tokens": [[…], …], "detail": {…}}
    end of file       -> the child ends

`prepare` does what must not be timed: it reads the rows and empties whatever the engine remembers of earlier runs.
Anything raised is sent as {"kind": "failed", "error": …} and ends the child.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Row:
    """One request: the answer is exactly `max_tokens` long, EOS is ignored."""

    prompt_ids: list[int]
    max_tokens: int
    shared_prefix: int  # leading tokens common to all rows of the workload


class Engine(Protocol):
    """A loaded engine."""

    versions: dict[str, str]
    settings: dict[str, Any]

    def prepare(self) -> None:
        """Forget earlier runs (prefix caches), and be as warm as after a run."""

    def answer(self, rows: Sequence[Row]) -> list[list[int]]:
        """The generated token ids of every row, greedy, in the order of the rows."""

    def detail(self) -> dict[str, float]:
        """What the engine says about its last run."""


def serve(load: Callable[[dict[str, Any]], Engine]) -> None:
    """Load, warm up and answer until stdin ends. argv[1]: settings as JSON; `warm_up` is a file of rows."""
    sys.stdout.flush()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        settings = json.loads(sys.argv[1])
        started = time.perf_counter()
        engine = load(settings)
        loaded = time.perf_counter()
        engine.answer(read_rows(settings["warm_up"], settings["warm_up_rows"]))
        _send(
            replies,
            kind="ready",
            load_s=loaded - started,
            warm_up_s=time.perf_counter() - loaded,
            versions=engine.versions,
            settings=engine.settings,
        )
        rows: list[Row] = []
        for line in sys.stdin:
            order = json.loads(line)
            if order["do"] == "prepare":
                rows = read_rows(order["rows"], order["limit"])
                engine.prepare()
                _send(replies, kind="prepared")
            else:
                started = time.perf_counter()
                tokens = engine.answer(rows)
                seconds = time.perf_counter() - started
                _send(replies, kind="answer", seconds=seconds, tokens=tokens, detail=engine.detail())
    except BaseException as error:
        traceback.print_exc()
        _send(replies, kind="failed", error=f"{type(error).__name__}: {error}")
        raise


def read_rows(path: str, limit: int | None) -> list[Row]:
    """The first `limit` rows of a workload file, or all."""
    with open(path, encoding="utf-8") as lines:  # noqa: PTH123
        found = [json.loads(line) for line in lines]
    return [Row(row["prompt_ids"], row["max_tokens"], row["shared_prefix"]) for row in found[:limit]]


def _send(replies: Any, **message: Any) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()
