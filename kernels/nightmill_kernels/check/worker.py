"""The process that compiles: `python -m nightmill_kernels.check.worker MODULE…`, one JSON object a line.

First it says which triton it has and what there is to compile; then it answers requests {module, index, arch}.
"""

import importlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TextIO

import triton

from nightmill_kernels.check.compile import SpecError, compile_spec
from nightmill_kernels.check.kernel_modules import forgotten_kernels, kernel_module_names, module_specs, spec_keys


def serve(names: Sequence[str], requests: TextIO, answers: TextIO) -> None:
    """Answer until `requests` ends."""
    names = names or kernel_module_names()
    _say(answers, _hello(names))
    for line in requests:
        asked = json.loads(line)
        spec = module_specs(importlib.import_module(asked["module"]))[asked["index"]]
        _say(answers, asdict(compile_spec(spec, asked["arch"])))


def _hello(names: Sequence[str]) -> dict[str, Any]:
    try:
        forgotten = forgotten_kernels(names)
    except SpecError:
        forgotten = []  # the same spec fails to compile, and says more there
    return {"triton": triton.__version__, "specs": [asdict(key) for key in spec_keys(names)], "forgotten": forgotten}


def _say(answers: TextIO, record: dict[str, Any]) -> None:
    answers.write(json.dumps(record) + "\n")
    answers.flush()


def main() -> None:
    """Keep the real stdout for answers: compilers print."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        serve(sys.argv[1:], sys.stdin, answers)


if __name__ == "__main__":
    main()
