"""Runs one section in this process: `python -m bench.gpu.child TASK_FILE`."""

import importlib
import sys
import traceback
from pathlib import Path

from bench.gpu.namespace import own_namespaces
from bench.gpu.notebook import Notebook
from bench.gpu.section import Task
from bench.gpu.switches import turn_off


def main(path: Path) -> int:
    task = Task.load(path)
    notebook = Notebook(task.notebook, seconds=task.seconds, folder=task.folder)
    own_namespaces()
    try:
        turn_off(task.without)
        importlib.import_module(task.module).run(notebook, task)
    except Exception:  # noqa: BLE001 - whatever it was, it belongs into the report
        lines = traceback.format_exc().strip().splitlines()
        print("\n".join(lines), flush=True)
        notebook.check("ran to its end", False, f"{lines[-1]} ({_place(lines)})")
        return 1
    return 0


def _place(lines: list[str]) -> str:
    """The innermost frame, file and line, of a traceback."""
    frames = [line.strip() for line in lines if line.lstrip().startswith("File ") and "<frozen" not in line]
    return frames[-1] if frames else "no frame"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
