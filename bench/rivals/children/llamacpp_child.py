"""llama.cpp through llama-cpp-python's C API, driven as its server drives it.

`slots` sequences share one unified KV cache; a batch takes every running slot's next token first, then chunks of
waiting prompts. The prefix that all rows share is computed once, in a sequence of its own, and copied to a slot
(by reference).
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import llama_cpp
import numpy as np
from answering import Row, serve


@dataclass
class Slot:
    """A row being answered."""

    row: int
    length: int  # tokens in the cache
    last: int | None = None  # the token to decode next; None: the prompt is not through


@llama_cpp.llama_log_callback
def _silent(_level: int, _text: bytes, _user: object) -> None:
    pass


class LlamaCpp:
    def __init__(self, given: dict[str, Any]) -> None:
        llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        system = llama_cpp.llama_print_system_info().decode()
        self.versions = {"llama-cpp-python": llama_cpp.__version__, "built for": system.strip(" |")}
        self.settings = {name: given[name] for name in ("slots", "batch_tokens", "context_tokens")} | {
            "weights": "BF16"
        }
        model_parameters = llama_cpp.llama_model_default_params()
        model_parameters.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(given["model"].encode(), model_parameters)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = given["context_tokens"]
        parameters.n_batch = parameters.n_ubatch = given["batch_tokens"]
        parameters.n_seq_max = given["slots"] + 1  # one holds the shared prefix
        parameters.n_threads = parameters.n_threads_batch = given["threads"]
        parameters.kv_unified = True
        parameters.no_perf = True
        self._context = llama_cpp.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise RuntimeError("llama.cpp made no context: see this log above")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(given["batch_tokens"], 0, 1)
        self._steps = 0

    def prepare(self) -> None:
        llama_cpp.llama_memory_clear(self._memory, True)

    def answer(self, rows: Sequence[Row]) -> list[list[int]]:
        llama_cpp.llama_memory_clear(self._memory, True)
        self._steps = 0
        shared = self._prefill_shared(rows)
        answers: list[list[int]] = [[] for _ in rows]
        waiting = list(range(len(rows)))[::-1]
        slots: list[Slot | None] = [None] * self.settings["slots"]
        reserved = shared
        while waiting or any(slots):
            for number, slot in enumerate(slots):
                if slot is None and waiting:
                    row = rows[waiting[-1]]
                    need = len(row.prompt_ids) - shared + row.max_tokens
                    if reserved + need <= self.settings["context_tokens"]:
                        reserved += need
                        if shared:
                            sequence = self.settings["slots"]
                            llama_cpp.llama_memory_seq_cp(self._memory, sequence, number, 0, shared)
                        slots[number] = Slot(waiting.pop(), shared)
            for number, token in self._step(rows, slots):
                slot = slots[number]
                assert slot is not None
                slot.last = token
                answers[slot.row].append(token)
                row = rows[slot.row]
                if len(answers[slot.row]) == row.max_tokens:
                    llama_cpp.llama_memory_seq_rm(self._memory, number, -1, -1)
                    reserved -= len(row.prompt_ids) - shared + row.max_tokens
                    slots[number] = None
        return answers

    def detail(self) -> dict[str, float]:
        return {"steps": self._steps}

    def _prefill_shared(self, rows: Sequence[Row]) -> int:
        shared = min(row.shared_prefix for row in rows)
        for first in range(0, shared, self.settings["batch_tokens"]):
            chunk = rows[0].prompt_ids[first : min(shared, first + self.settings["batch_tokens"])]
            for i, token in enumerate(chunk):
                self._put(i, token, first + i, self.settings["slots"], wants_logits=False)
            self._decode(len(chunk))
        return shared

    def _step(self, rows: Sequence[Row], slots: Sequence[Slot | None]) -> list[tuple[int, int]]:
        """One batch; (slot, next token) of every slot that has one now."""
        count, wanted = 0, []
        for number, slot in enumerate(slots):
            if slot is not None and slot.last is not None:
                self._put(count, slot.last, slot.length, number, wants_logits=True)
                slot.length += 1
                wanted.append((count, number))
                count += 1
        for number, slot in enumerate(slots):
            if slot is None or slot.last is not None:
                continue
            prompt = rows[slot.row].prompt_ids
            for token in prompt[slot.length : slot.length + self.settings["batch_tokens"] - count]:
                is_last = slot.length == len(prompt) - 1
                self._put(count, token, slot.length, number, wants_logits=is_last)
                if is_last:
                    wanted.append((count, number))
                slot.length += 1
                count += 1
        self._decode(count)
        return [(number, self._argmax(place)) for place, number in wanted]

    def _put(self, place: int, token: int, position: int, sequence: int, *, wants_logits: bool) -> None:
        batch = self._batch
        batch.token[place], batch.pos[place] = token, position
        batch.n_seq_id[place] = 1
        batch.seq_id[place][0] = sequence
        batch.logits[place] = wants_logits

    def _decode(self, count: int) -> None:
        self._batch.n_tokens = count
        self._steps += 1
        code = llama_cpp.llama_decode(self._context, self._batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code} for a batch of {count} tokens")

    def _argmax(self, place: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, place)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())


if __name__ == "__main__":
    serve(LlamaCpp)
