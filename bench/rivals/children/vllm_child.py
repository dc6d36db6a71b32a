"""vLLM on the CPU, offline `LLM.generate`, prefix caching on."""

from collections.abc import Sequence
from typing import Any

import torch
import transformers
import vllm
from answering import Row, serve
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt


class Vllm:
    def __init__(self, given: dict[str, Any]) -> None:
        self.versions = {"vllm": vllm.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
        self.settings = {
            "dtype": "bfloat16",
            "max_model_len": 2048,
            "max_num_seqs": given["max_num_seqs"],
            "max_num_batched_tokens": given["max_num_batched_tokens"],
            "enable_prefix_caching": True,
        }
        self._llm = LLM(given["model"], seed=0, **self.settings)

    def prepare(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not empty its prefix cache")

    def answer(self, rows: Sequence[Row]) -> list[list[int]]:
        prompts = [TokensPrompt(prompt_token_ids=row.prompt_ids) for row in rows]
        sampling = [
            SamplingParams(temperature=0, max_tokens=row.max_tokens, ignore_eos=True, detokenize=False) for row in rows
        ]
        return [list(done.outputs[0].token_ids) for done in self._llm.generate(prompts, sampling, use_tqdm=False)]

    def detail(self) -> dict[str, float]:
        return {}


if __name__ == "__main__":
    serve(Vllm)
