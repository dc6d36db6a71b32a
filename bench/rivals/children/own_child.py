"""Our engine: the loop and the model's runner of the engine process, in a child like any other."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from answering import Row, serve

from nightmill.records import EngineOptions, ModelSpec
from nightmill_worker.bench import own_engine
from nightmill_worker.bench.machine import this_machine
from nightmill_worker.bench.workload import Workload, WorkloadRow
from nightmill_worker.cores import claim_cores, find_cores, plan_cores
from nightmill_worker.engine.roofline import HasRoofline
from nightmill_worker.model.config import ModelConfig
from nightmill_worker.model_recipe import ModelRecipe


class Own:
    def __init__(self, given: dict[str, Any]) -> None:
        directory, spec = Path(given["model"]), ModelSpec(model=given["model"], dtype="bfloat16")
        limits = {name: given[name] for name in ("max_num_seqs", "max_num_batched_tokens")}
        options = EngineOptions(device="cpu", num_threads=given["threads"], **limits)
        cores = find_cores()
        plan = claim_cores(plan_cores(cores, num_threads=given["threads"]), cores)  # as the engine of a job
        runner = ModelRecipe(directory=directory, spec=spec, options=options, cores=plan).build()
        max_model_len = ModelConfig.from_directory(directory).resolve_max_model_len(None)
        self.versions = this_machine().versions
        self.settings = {"dtype": "bfloat16", "max_model_len": max_model_len, **limits}
        if isinstance(runner, HasRoofline) and runner.roofline is not None:
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
