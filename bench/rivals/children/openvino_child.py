"""openvino-genai's ContinuousBatchingPipeline on the CPU, prefix caching on. `model`: IR directory or GGUF file."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino
import openvino_genai
from answering import Row, read_rows, serve


class Openvino:
    def __init__(self, given: dict[str, Any]) -> None:
        self.versions = {"openvino": openvino.__version__, "openvino-genai": openvino_genai.__version__}
        self.settings = {
            "max_num_seqs": given["max_num_seqs"],
            "max_num_batched_tokens": given["max_num_batched_tokens"],
            "cache_gb": given["cache_gb"],
            "properties": {
                "INFERENCE_NUM_THREADS": given["threads"],
                "INFERENCE_PRECISION_HINT": "bf16",
                "KV_CACHE_PRECISION": given["kv_precision"],
                "ENABLE_CPU_PINNING": True,
            },
        }
        self._model = given["model"]
        self._warm_up = read_rows(given["warm_up"], given["warm_up_rows"])
        self._pipeline = self._load()

    def _load(self) -> Any:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = self.settings["cache_gb"]
        scheduler.max_num_seqs = self.settings["max_num_seqs"]
        scheduler.max_num_batched_tokens = self.settings["max_num_batched_tokens"]
        scheduler.enable_prefix_caching = True
        scheduler.dynamic_split_fuse = True
        return openvino_genai.ContinuousBatchingPipeline(self._model, scheduler, "CPU", self.settings["properties"])

    def prepare(self) -> None:
        """Its prefix cache cannot be emptied: load again (some seconds, not timed), and warm up again."""
        del self._pipeline
        self._pipeline = self._load()
        self.answer(self._warm_up)

    def answer(self, rows: Sequence[Row]) -> list[list[int]]:
        handles = []
        for number, row in enumerate(rows):
            if number == 1 and row.shared_prefix:
                # It shares only what a sequence has already computed: the first one goes ahead of those that wait for
                # its prefix. Without this each row of the first batch computes it again: three times the work in all.
                for _ in range(len(rows[0].prompt_ids) // self.settings["max_num_batched_tokens"] + 1):
                    self._pipeline.step()
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens = row.max_tokens
            config.ignore_eos = True
            config.do_sample = False
            prompt = openvino.Tensor(np.array([row.prompt_ids], dtype=np.int64))
            handles.append(self._pipeline.add_request(number, prompt, config))
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return [list(handle.read_all()[0].generated_ids) for handle in handles]

    def detail(self) -> dict[str, float]:
        return {}


if __name__ == "__main__":
    serve(Openvino)
