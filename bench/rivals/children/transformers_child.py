"""transformers' `generate` on static batches sorted by output length: what people have without an engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from answering import Row, serve

from nightmill_worker.bench.machine import this_machine
from nightmill_worker.bench.transformers_static import TransformersStatic
from nightmill_worker.bench.workload import Workload, WorkloadRow


class Transformers:
    def __init__(self, given: dict[str, Any]) -> None:
        torch.set_num_threads(given["threads"])
        self.versions = {name: this_machine().versions[name] for name in ("torch", "transformers")}
        self.settings = {"dtype": "bfloat16", "batch_size": given["batch_size"], "attention": "sdpa"}
        self._model = TransformersStatic(Path(given["model"]), torch.bfloat16, given["batch_size"])

    def prepare(self) -> None:
        """It remembers nothing."""

    def answer(self, rows: Sequence[Row]) -> list[list[int]]:
        given = tuple(WorkloadRow(tuple(row.prompt_ids), row.max_tokens, row.shared_prefix) for row in rows)
        return self._model.answer(Workload("rivals", given, sha256=""))

    def detail(self) -> dict[str, float]:
        return {}


if __name__ == "__main__":
    serve(Transformers)
