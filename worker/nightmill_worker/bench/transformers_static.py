"""The baseline everybody has: transformers' `generate` on static batches, left-padded, sorted by output length.

Sorting by output length is the kindest order for a static batch: rows that end together run together.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nightmill_worker.bench.measurement import Measurement
from nightmill_worker.bench.workload import Workload, WorkloadRow

ENGINE = "transformers"
PAD_TOKEN_ID = 2


class TransformersStatic:
    """A loaded transformers model that answers workloads in static batches."""

    def __init__(self, model_dir: Path, dtype: torch.dtype, batch_size: int = 32) -> None:
        # Imported here: it costs seconds and hundreds of MB that only this comparison needs.
        from transformers import AutoModelForCausalLM

        self.batch_size = batch_size
        self._model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, attn_implementation="sdpa")
        self._model.eval()
        # Lengths are exact in a workload, so nothing may end a row early.
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = PAD_TOKEN_ID

    def run(self, workload: Workload, progress: Callable[[int], None] | None = None) -> Measurement:
        """Answer every row; `progress` is called with the number of rows finished by each batch."""
        rows = workload.rows
        started = time.perf_counter()
        answers = self.answer(workload, progress)
        wrong = sum(len(tokens) != row.max_tokens for tokens, row in zip(answers, rows, strict=True))
        return Measurement(
            engine=ENGINE,
            workload=workload.name,
            rows=len(rows),
            prompt_tokens=workload.prompt_tokens,
            output_tokens=workload.output_tokens,
            seconds=time.perf_counter() - started,
            rows_wrong_length=wrong,
            detail={"batch_size": self.batch_size},
        )

    def answer(self, workload: Workload, progress: Callable[[int], None] | None = None) -> list[list[int]]:
        """The generated token ids of each row, in the order of the rows."""
        rows = workload.rows
        order = sorted(range(len(rows)), key=lambda i: (rows[i].max_tokens, len(rows[i].prompt_ids)), reverse=True)
        answers: list[list[int]] = [[] for _ in rows]
        for first in range(0, len(order), self.batch_size):
            batch = order[first : first + self.batch_size]
            for i, tokens in zip(batch, self._generate([rows[i] for i in batch]), strict=True):
                answers[i] = tokens
            if progress is not None:
                progress(len(batch))
        return answers

    @torch.inference_mode()
    def _generate(self, batch: list[WorkloadRow]) -> list[list[int]]:
        width = max(len(row.prompt_ids) for row in batch)
        steps = max(row.max_tokens for row in batch)
        ids = torch.full((len(batch), width), PAD_TOKEN_ID)
        mask = torch.zeros((len(batch), width), dtype=torch.long)
        for i, row in enumerate(batch):
            ids[i, width - len(row.prompt_ids) :] = torch.tensor(row.prompt_ids)
            mask[i, width - len(row.prompt_ids) :] = 1
        out = self._model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=steps, do_sample=False)
        generated: list[list[int]] = out[:, width:].tolist()
        return [tokens[: row.max_tokens] for tokens, row in zip(generated, batch, strict=True)]
