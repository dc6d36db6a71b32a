"""Drives a Runner through its page pool without the engine: the smallest scheduler that can chunk and batch."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from nightmill_worker.engine.step import NULL_PAGE, Runner, SampleBatch, StepPlan


@dataclass(slots=True, eq=False)
class DrivenSequence:
    tokens: list[int]
    num_prompt_tokens: int
    num_computed: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]


class PagedDriver:
    """Pages are handed out in a shuffled order, so that a kernel that assumes neighbours fails."""

    def __init__(self, runner: Runner, *, seed: int = 0) -> None:
        self.runner = runner
        self.page_size = runner.pool.page_size
        self._free = list(range(1, runner.pool.num_pages))
        random.Random(seed).shuffle(self._free)
        self._step = 0

    def add(self, prompt: Sequence[int]) -> DrivenSequence:
        return DrivenSequence(list(prompt), len(prompt))

    def release(self, sequence: DrivenSequence) -> None:
        self._free.extend(sequence.pages)
        sequence.pages = []

    def plan(self, work: Sequence[tuple[DrivenSequence, int]], *, every_token: bool = False) -> StepPlan:
        """Schedule the next `count` tokens of each sequence; `every_token` asks for logits at all of them."""
        ids, positions, slots, starts, tables, rows = [], [], [], [0], [], []
        for index, (sequence, count) in enumerate(work):
            first, last = sequence.num_computed, sequence.num_computed + count
            assert 1 <= count <= len(sequence.tokens) - first
            while len(sequence.pages) * self.page_size < last:
                sequence.pages.append(self._free.pop())
            for position in range(first, last):
                page = sequence.pages[position // self.page_size]
                slots.append(page * self.page_size + position % self.page_size)
                if every_token or position == len(sequence.tokens) - 1:
                    rows.append((index, len(ids), position + 1))
                ids.append(sequence.tokens[position])
                positions.append(position)
            starts.append(len(ids))
            tables.append(sequence.pages)
            sequence.num_computed = last
        width = max(map(len, tables))
        self._step += 1
        return StepPlan(
            step=self._step,
            token_ids=np.array(ids, np.int32),
            positions=np.array(positions, np.int32),
            slots=np.array(slots, np.int64),
            query_starts=np.array(starts, np.int32),
            context_lens=np.array([sequence.num_computed for sequence, _ in work], np.int32),
            page_tables=np.array([[*t, *[NULL_PAGE] * (width - len(t))] for t in tables], np.int32),
            sample=greedy_batch(rows),
        )

    def generate(self, prompts: Sequence[Sequence[int]], *, max_tokens: int, chunk: int = 1 << 30) -> list[list[int]]:
        """Greedy completions of all prompts in one continuous batch; prompts enter in chunks of `chunk` tokens."""
        sequences = [self.add(prompt) for prompt in prompts]
        running = list(sequences)
        while running:
            work = [(s, min(chunk, len(s.tokens) - s.num_computed)) for s in running]
            plan = self.plan(work)
            output = self.runner.run(plan)
            assert not output.failed, output.failed
            for sequence_index, token in zip(plan.sample.sequence, output.tokens, strict=True):
                running[sequence_index].tokens.append(int(token))
            running = [s for s in running if len(s.generated) < max_tokens]
        for sequence in sequences:
            self.release(sequence)
        return [sequence.generated for sequence in sequences]


def greedy_batch(rows: Sequence[tuple[int, int, int]]) -> SampleBatch:
    """Greedy parameters for rows of (sequence, token index, position of the drawn token)."""
    n = len(rows)
    sequence, token_index, position = (np.array([row[i] for row in rows], np.int64) for i in range(3))
    return SampleBatch(
        sequence=sequence.astype(np.int32),
        token_index=token_index.astype(np.int32),
        position=position,
        seed=np.zeros(n, np.uint64),
        temperature=np.zeros(n, np.float32),
        top_k=np.zeros(n, np.int32),
        top_p=np.ones(n, np.float32),
        min_p=np.zeros(n, np.float32),
        presence_penalty=np.zeros(n, np.float32),
        frequency_penalty=np.zeros(n, np.float32),
        repetition_penalty=np.ones(n, np.float32),
        num_logprobs=np.full(n, -1, np.int32),
        any_random=False,
    )
