"""Our engine: the loop and the model's runner of the engine process, in a child like any other."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from answering import Row, serve

from nightmill_worker.model.threads import limit_spinning

limit_spinning()  # as in the engine process, and before torch

import torch  # noqa: E402

from nightmill.records import EngineOptions, ModelSpec  # noqa: E402
from nightmill_worker.bench import own_engine  # noqa: E402
from nightmill_worker.bench.machine import this_machine  # noqa: E402
from nightmill_worker.bench.workload import Workload, WorkloadRow  # noqa: E402
from nightmill_worker.model.config import ModelConfig  # noqa: E402
from nightmill_worker.model.runner import ModelRunnerConfig  # noqa: E402


class Own:
    def __init__(self, given: dict[str, Any]) -> None:
        torch.set_num_threads(given["threads"])
        directory, spec = Path(given["model"]), ModelSpec(model=given["model"], dtype="bfloat16")
        max_model_len = ModelConfig.from_directory(directory).resolve_max_model_len(None)
        limits = {name: given[name] for name in ("max_num_seqs", "max_num_batched_tokens")}
        options = EngineOptions(max_num_seqs=given["max_num_seqs"])
        runner = ModelRunnerConfig(model_dir=directory, spec=spec, options=options).build()
        self.versions = this_machine().versions
        self.settings = {"dtype": "bfloat16", "page_size": options.page_size, "max_model_len": max_model_len, **limits}
        if runner.roofline is not None:
            self.settings["ceilings"] = dataclasses.asdict(runner.roofline.ceilings)
        self._engine = own_engine.continuous(runner, max_model_len=max_model_len, **limits)
        self._detail: dict[str, float] = {}

    def prepare(self) -> None:
        """Nothing: every run of OwnEngine starts from an empty prefix index."""

    def answer(self, rows: Sequence[Row]) -> list[list[int]]:
        given = tuple(WorkloadRow(tuple(row.prompt_ids), row.max_tokens, row.shared_prefix) for row in rows)
        measurement, finished = self._engine.answer(Workload("rivals", given, sha256=""))
        self._detail = dict(measurement.detail)
        by_row = {done.request_id: list(done.token_ids) for done in finished}
        return [by_row.get(i, []) for i in range(len(rows))]

    def detail(self) -> dict[str, float]:
        return self._detail


if __name__ == "__main__":
    serve(Own)
