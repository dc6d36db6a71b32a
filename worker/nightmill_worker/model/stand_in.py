"""A step for nobody: what is recorded, compiled or measured before there is a request."""

import numpy as np

from nightmill_worker.engine.step import NULL_PAGE, SampleBatch, StepPlan


def stand_in(num_rows: int, *, draws: int = 0, temperature: float = 0.0, filters: bool = False) -> StepPlan:
    """Decodes of token 0 that see one token of the null page, and write nothing; the first `draws` of them draw.

    `filters`: with a top-k and a top-p, which have kernels of their own.
    """
    zeros = np.zeros(num_rows, np.int32)
    return StepPlan(
        step=0,
        token_ids=zeros,
        positions=zeros,
        slots=np.full(num_rows, -1, np.int64),
        query_starts=np.arange(num_rows + 1, dtype=np.int32),
        context_lens=zeros + 1,
        page_tables=np.full((num_rows, 1), NULL_PAGE, np.int32),
        sample=_draws(draws, temperature, filters),
    )


def _draws(count: int, temperature: float, filters: bool) -> SampleBatch:
    ints, floats = np.zeros(count, np.int32), np.zeros(count, np.float32)
    return SampleBatch(
        sequence=np.arange(count, dtype=np.int32),
        token_index=np.arange(count, dtype=np.int32),
        position=np.ones(count, np.int64),
        seed=np.zeros(count, np.uint64),
        temperature=floats + np.float32(temperature),
        top_k=ints + (2 if filters else 0),
        top_p=floats + np.float32(0.5 if filters else 1),
        min_p=floats,
        presence_penalty=floats,
        frequency_penalty=floats,
        repetition_penalty=floats + 1,
        num_logprobs=ints - 1,
        any_random=temperature > 0,
    )
