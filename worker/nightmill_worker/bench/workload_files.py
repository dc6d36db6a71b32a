"""The workloads as files, for the runners of other engines: `W1.jsonl` and so on, one request a line."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nightmill.records import ModelSpec
from nightmill_worker.bench.workload import Workload, canonical_lines, make_workloads
from nightmill_worker.feed.tokenizer import Tokenizer
from nightmill_worker.model.source import resolve_model


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadFile:
    """A file that has been written."""

    path: Path
    workload: Workload
    sha256: str  # of the file, 64 hex digits


def write_workloads(folder: Path, model: str, *, progress: Callable[[str], None]) -> list[WorkloadFile]:
    """Write every workload in the tokens of a model; the folder is made, files of these names are replaced.

    Raises:
        ModelError: there is no such model.
        OSError: a file cannot be written.
    """
    tokenizer = Tokenizer.load(resolve_model(ModelSpec(model=model), progress=progress).directory)
    made = make_workloads(lambda text: tokenizer.encode(text, add_special_tokens=False), tokenizer.decode)
    return [_write(folder, workload, tokenizer) for workload in made.values()]


def _write(folder: Path, workload: Workload, tokenizer: Tokenizer) -> WorkloadFile:
    path = folder / f"{workload.name}.jsonl"
    content = "".join(f"{line}\n" for line in canonical_lines(workload.name, workload.rows, tokenizer.decode)).encode()
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return WorkloadFile(path=path, workload=workload, sha256=hashlib.sha256(content).hexdigest())
