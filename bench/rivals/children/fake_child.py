"""A named fake: an engine that answers with numbers and misbehaves on request; the driver's tests run it.

Settings: `seconds` a run takes, `load_s`, `first_token`, and `fault`, one of

    load      raises while it loads            short     leaves the last token of row 0 out
    crash     ends in the middle of a run      hang      never answers a run
"""

import os
import time
from collections.abc import Sequence
from typing import Any

from answering import Row, serve


class Fake:
    def __init__(self, given: dict[str, Any]) -> None:
        self.versions = {"fake": "1.0"}
        self.settings = {
            "seconds": given["seconds"],
            "max_num_seqs": 2,
            "ceilings": {"flops": 1e12, "bytes_per_s": 1e10},
        }
        self._given, self._runs, self._is_warm = given, 0, False
        self._is_empty = True
        print("the engine itself may print what it likes")
        time.sleep(given.get("load_s", 0.0))
        if given.get("fault") == "load":
            raise RuntimeError("no such model")

    def prepare(self) -> None:
        self._is_empty = True

    def answer(self, rows: Sequence[Row]) -> list[list[int]]:
        fault = self._given.get("fault") if self._is_warm else None
        if not self._is_empty:
            raise RuntimeError("run twice without being prepared")
        self._is_empty = not self._is_warm
        if self._is_warm:
            self._runs += 1
            time.sleep(self._given["seconds"])
        self._is_warm = True
        if fault == "crash":
            os._exit(7)
        if fault == "hang":
            time.sleep(600)
        first = self._given.get("first_token", 1)
        answers = [[first, *range(1, row.max_tokens)] for row in rows]
        if fault == "short":
            answers[0].pop()
        return answers

    def detail(self) -> dict[str, float]:
        return {"runs": self._runs}


if __name__ == "__main__":
    serve(Fake)
